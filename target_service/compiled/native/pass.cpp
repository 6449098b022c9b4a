// The kernel of `flashduet::attend` for passes that run without the interpreter, and these passes.
//
// A pass's plan (which rows are whose, and in which blocks their keys and values lie) is the running
// thread's while its package runs, so that layers find it. Everything that addresses memory is
// checked where it comes in: tables when a store is made, the plan when a pass begins, tensors in
// each call.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "product.h"
#include "shares.h"

namespace flashduet {
namespace {

using at::Tensor;

// The tables of a block store; they are kept alive. Belongs to one thread at a time.
struct Store : torch::CustomClassHolder {
  // keys, values: a layer's [kv_heads, slots, size] each. windows, chunks: its rule, 0 for none.
  Store(
      std::vector<Tensor> given_keys, std::vector<Tensor> given_values,
      const std::vector<std::int64_t>& windows, const std::vector<std::int64_t>& chunks,
      std::int64_t tokens)
      : keys(std::move(given_keys)), values(std::move(given_values)), block_tokens(tokens) {
    TORCH_CHECK_VALUE(
        !keys.empty() && values.size() == keys.size() && windows.size() == keys.size() &&
            chunks.size() == keys.size(),
        "as many keys, values, windows and chunks as layers, at least 1");
    TORCH_CHECK_VALUE(block_tokens > 0, "blocks of ", block_tokens, " tokens");
    slots = keys[0].dim() == 3 ? keys[0].size(1) : 0;
    TORCH_CHECK_VALUE(slots > 0 && slots % block_tokens == 0, "slots are no whole blocks");
    for (std::size_t i = 0; i < keys.size(); ++i) {
      for (const Tensor& table : {keys[i], values[i]}) {
        TORCH_CHECK_VALUE(
            table.device().is_cpu() && table.is_contiguous() && table.dim() == 3 &&
                table.scalar_type() == keys[0].scalar_type() && table.size(1) == slots &&
                table.size(0) == keys[i].size(0) && table.size(0) > 0 && table.size(2) > 0,
            "the tables of layer ", i, " are not [kv_heads, ", slots, ", size] of one type");
      }
      TORCH_CHECK_VALUE(windows[i] >= 0 && chunks[i] >= 0, "a window or chunk below 0");
      rules.push_back({windows[i], chunks[i]});
    }
  }

  std::vector<Tensor> keys;
  std::vector<Tensor> values;
  std::vector<Rule> rules;
  std::int64_t block_tokens;
  std::int64_t slots = 0;
};

// What is told of a pass: int64 numbers, for each span its rows, base, number of blocks and the
// blocks' ids. Spans lie one after the other in the packed row.
struct Plan {
  Plan(const Store& from, Tensor numbers) : store(from), held(std::move(numbers)) {
    TORCH_CHECK_VALUE(
        held.device().is_cpu() && held.is_contiguous() && held.scalar_type() == at::kLong,
        "a plan is of int64 numbers");
    const std::int64_t* at = held.const_data_ptr<std::int64_t>();
    const std::int64_t* const end = at + held.numel();
    while (at != end) {
      TORCH_CHECK_VALUE(end - at >= 3, "the plan ends within a span");
      const std::int64_t count = at[0], base = at[1], blocks = at[2];
      at += 3;
      TORCH_CHECK_VALUE(blocks >= 0 && blocks <= end - at, "the plan ends within its block ids");
      TORCH_CHECK_VALUE(
          count > 0 && base >= 0 && count <= kMostPositions && base <= kMostPositions &&
              base + count <= blocks * store.block_tokens,
          count, " rows from ", base, " on in ", blocks, " blocks of ", store.block_tokens);
      for (std::int64_t i = 0; i < blocks; ++i) {
        TORCH_CHECK_VALUE(
            at[i] >= 0 && at[i] < store.slots / store.block_tokens, "there is no block ", at[i]);
      }
      spans.push_back({rows, count, base, at});
      rows += count;
      at += blocks;
    }
  }

  // Far from where sums of positions and rows could overflow.
  static constexpr std::int64_t kMostPositions = std::int64_t{1} << 40;

  const Store& store;
  const Tensor held;
  std::vector<Span> spans;
  std::int64_t rows = 0;
};

template <class T>
void write(const Plan& plan, const Tensor& from, const Tensor& table) {
  const std::int64_t size = table.size(2), tokens = plan.store.block_tokens;
  at::parallel_for(0, table.size(0), 1 + 65536 / (1 + plan.rows * size), [&](auto begin, auto end) {
    for (std::int64_t head = begin; head < end; ++head) {
      const T* rows = from.const_data_ptr<T>() + head * from.stride(1);
      T* slots = table.mutable_data_ptr<T>() + head * plan.store.slots * size;
      for (const Span& span : plan.spans) {
        for (std::int64_t i = 0; i < span.rows; ++i) {
          const std::int64_t position = span.base + i;
          const std::int64_t slot = span.block_ids[position / tokens] * tokens + position % tokens;
          const T* row = rows + (span.row + i) * from.stride(2);
          std::copy(row, row + size, slots + slot * size);
        }
      }
    }
  });
}

Tensor with_rows_that_touch(const Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : tensor.contiguous();
}

template <class Unit>
void attend_as(
    const Plan& plan, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& sinks, std::size_t index, double scaling, double softcap, Tensor& output) {
  using T = typename Unit::Element;
  const Store& store = plan.store;
  const Tensor &keys = store.keys[index], &values = store.values[index];
  write<T>(plan, key, keys);
  write<T>(plan, value, values);
  Layer<T> layer{};
  layer.query = query.const_data_ptr<T>();
  layer.query_head_stride = query.stride(1);
  layer.query_row_stride = query.stride(2);
  layer.keys = keys.const_data_ptr<T>();
  layer.values = values.const_data_ptr<T>();
  layer.slots = store.slots;
  layer.block_tokens = store.block_tokens;
  layer.heads = static_cast<int>(query.size(1));
  layer.group = static_cast<int>(query.size(1) / keys.size(0));
  layer.key_size = static_cast<int>(keys.size(2));
  layer.value_size = static_cast<int>(values.size(2));
  layer.rule = store.rules[index];
  layer.scaling = static_cast<float>(scaling);
  layer.softcap = static_cast<float>(softcap);
  layer.sinks = sinks.defined() ? sinks.const_data_ptr<float>() : nullptr;
  layer.output = output.mutable_data_ptr<T>();
  const std::int64_t row_size = output.size(2) * output.size(3);
  std::fill(layer.output + plan.rows * row_size, layer.output + output.numel(), T{});
  const int kv_heads = static_cast<int>(keys.size(0));
  Shares(plan.spans, kv_heads, layer.group, layer.rule).template run<Unit>(layer);
}

// Puts the rows' keys and values into the store, then attends. Rows that the plan does not name
// fill the packed row up and come out as zeros.
Tensor attend(
    const Plan& plan, const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& sinks, std::int64_t index, double scaling,
    std::optional<double> softcap) {
  const Store& store = plan.store;
  TORCH_CHECK_INDEX(
      index >= 0 && index < static_cast<std::int64_t>(store.keys.size()), "no layer ", index);
  const Tensor &keys = store.keys[index], &values = store.values[index];
  TORCH_CHECK_VALUE(query.dim() == 4 && query.size(0) == 1, "queries are not [1, heads, n, size]");
  const std::int64_t heads = query.size(1), rows = query.size(2), kv_heads = keys.size(0);
  TORCH_CHECK_VALUE(
      heads > 0 && heads % kv_heads == 0 && query.size(3) == keys.size(2),
      "queries ", query.sizes(), " over keys ", keys.sizes());
  TORCH_CHECK_VALUE(
      key.sizes() == at::IntArrayRef({1, kv_heads, rows, keys.size(2)}) &&
          value.sizes() == at::IntArrayRef({1, kv_heads, rows, values.size(2)}),
      "keys ", key.sizes(), " and values ", value.sizes(), " of ", rows, " rows do not fit");
  TORCH_CHECK_VALUE(rows >= plan.rows, plan.rows, " rows planned, ", rows, " given");
  for (const Tensor* tensor : {&query, &key, &value}) {
    TORCH_CHECK_VALUE(
        tensor->device().is_cpu() && tensor->scalar_type() == keys.scalar_type(),
        "operands are not of the store's type");
  }
  Tensor weights;
  if (sinks) {
    TORCH_CHECK_VALUE(sinks->numel() == heads, sinks->numel(), " sinks for ", heads, " heads");
    weights = sinks->to(at::kFloat).contiguous();
  }
  TORCH_CHECK_VALUE(!softcap || *softcap > 0, "a softcap that is not above 0");
  Tensor output = at::empty({1, rows, heads, values.size(2)}, query.options());
  const auto run = [&](auto unit) {
    attend_as<decltype(unit)>(
        plan, with_rows_that_touch(query), with_rows_that_touch(key), with_rows_that_touch(value),
        weights, index, scaling, softcap.value_or(0), output);
  };
  switch (keys.scalar_type()) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    case at::kBFloat16: run(Pairs{}); break;
#else
    case at::kBFloat16: run(Singles<c10::BFloat16>{}); break;
#endif
    case at::kHalf: run(Singles<c10::Half>{}); break;
    case at::kFloat: run(Singles<float>{}); break;
    default: TORCH_CHECK_TYPE(false, "attention in ", keys.scalar_type(), " is not supported");
  }
  return output;
}

// See flashduet/native; the weight lies as its `pack` lays it.
Tensor product(const Tensor& x, const Tensor& weight) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  TORCH_CHECK_VALUE(
      x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16 &&
          weight.dim() == 4 && weight.is_contiguous() && weight.size(2) == kOutputs &&
          weight.size(3) == 2 && x.size(-1) == 2 * weight.size(1),
      "a product of ", x.sizes(), " and ", weight.sizes());
  const Tensor rows = x.contiguous();
  const std::int64_t in = x.size(-1), out = weight.size(0) * kOutputs;
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes.back() = out;
  Tensor to = at::empty(sizes, x.options());
  multiply_weights(
      rows.const_data_ptr(), rows.numel() / in, in, weight.const_data_ptr(), to.mutable_data_ptr(),
      out, at::get_num_threads());
  return to;
#else
  TORCH_CHECK(false, "made for another processor");
#endif
}

thread_local const Plan* running = nullptr;

struct Running {
  explicit Running(const Plan& plan) : before(std::exchange(running, &plan)) {}
  ~Running() {
    running = before;
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  const Plan* const before;
};

Tensor attend_running(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& sinks, std::int64_t index, double scaling,
    std::optional<double> softcap) {
  if (running) {
    return attend(*running, query, key, value, sinks, index, scaling, softcap);
  }
  // A pass that Python runs.
  static const auto in_python = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("flashduet::attend_in_python", "")
                                    .typed<decltype(attend_running)>();
  return in_python.call(query, key, value, sinks, index, scaling, softcap);
}

// A compiled package. `torch._inductor` would run it with the interpreter's lock held.
struct Package : torch::CustomClassHolder {
  explicit Package(const std::string& path) : loader(path) {}

  std::vector<Tensor> run(
      const c10::intrusive_ptr<Store>& store, const Tensor& numbers, std::vector<Tensor> inputs) {
    const Plan plan(*store, numbers);
    const Running now(plan);
    return loader.boxed_run(std::move(inputs));
  }

  torch::inductor::AOTIModelPackageLoader loader;
};

// One layer's attention on its own.
Tensor attend_once(
    const c10::intrusive_ptr<Store>& store, const Tensor& numbers, const Tensor& query,
    const Tensor& key, const Tensor& value, const std::optional<Tensor>& sinks, std::int64_t index,
    double scaling, std::optional<double> softcap) {
  const Plan plan(*store, numbers);
  return attend(plan, query, key, value, sinks, index, scaling, softcap);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(flashduet, library) {
  library.class_<Store>("Store")
      .def(torch::init<
           std::vector<Tensor>, std::vector<Tensor>, const std::vector<std::int64_t>&,
           const std::vector<std::int64_t>&, std::int64_t>())
      .def("attend", &attend_once);
  library.class_<Package>("Package")
      .def(torch::init<const std::string&>())
      .def("run", &Package::run);
}

TORCH_LIBRARY_IMPL(flashduet, CPU, library) {
  library.impl("attend", &attend_running);
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  library.impl("product", &product);
#endif
}

}  // namespace flashduet
