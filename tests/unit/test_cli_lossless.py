"""What counts as a near-tie, and what a check concludes."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flashduet.errors import ConfigurationError
from flashduet.sampling.choose import choose_tokens
from flashduet.sampling.noise import gumbel
from flashduet.sampling.params import Sampling
from flashduet_cli.lossless.near_tie import Judgement, judge
from flashduet_cli.lossless.random_drafter import write_random_drafter
from flashduet_cli.lossless.reference import Reference
from flashduet_cli.lossless.report import Answer, Difference, Report, first_difference
from flashduet_cli.prompt_file import read_prompts
from tests.support.tiny import tiny_drafter, tiny_target

GREEDY = Sampling()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


class TestGreedy:
    def test_a_gap_within_twice_the_error_is_a_near_tie(self):
        exact = row(1.0, 1.0 - 1.9e-6, -3.0)
        found = judge(exact, [exact + 0.0, exact + row(0, 1e-6, 0)], (0, 1), GREEDY, 5)
        assert found.near_tie
        assert found.gap == pytest.approx(1.9e-6)
        assert found.bound == pytest.approx(2e-6)

    def test_a_gap_above_it_is_a_difference(self):
        exact = row(1.0, 1.0 - 2.1e-6, -3.0)
        assert not judge(exact, [exact + row(0, 1e-6, 0)], (0, 1), GREEDY, 5).near_tie

    def test_two_losers_close_to_each_other_are_no_near_tie(self):
        """What counts is the distance from the best, not the two tokens' from each other."""
        exact = row(9.0, 1.0, 1.0)
        assert not judge(exact, [exact + 1e-6], (1, 2), GREEDY, 5).near_tie

    def test_without_any_error_only_equal_logits_are_tied(self):
        exact = row(1.0, 1.0, 0.0)
        assert judge(exact, [exact], (0, 1), GREEDY, 5).near_tie
        exact = row(1.0, 1.0 - 1e-12, 0.0)
        assert not judge(exact, [exact], (0, 1), GREEDY, 5).near_tie


class TestSampled:
    """Logits are made so that the perturbed scores of two tokens are at a chosen gap."""

    position = 33
    sampling = Sampling(temperature=0.7, seed=9)

    def noise(self, size: int) -> np.ndarray:
        ids = torch.arange(size)
        return gumbel(self.sampling.seed, 0, self.position, ids).numpy()

    def tied(self, size: int, first: int, second: int, gap: float) -> np.ndarray:
        """Logits [size] whose best perturbed scores are those of two tokens, `gap` apart."""
        scores = np.full(size, -9.0)
        scores[first], scores[second] = 2.0, 2.0 - gap
        return (scores - self.noise(size)) * self.sampling.temperature

    @pytest.mark.parametrize(("gap", "near"), [(1e-7, True), (1e-3, False)])
    def test_the_gap_is_that_of_perturbed_scores(self, gap, near):
        exact = self.tied(300, 11, 200, gap)
        rounded = exact + 1e-6 * np.cos(np.arange(300))
        found = judge(exact, [rounded], (11, 200), self.sampling, self.position)
        assert found.near_tie is near
        assert found.gap == pytest.approx(gap, rel=1e-3)
        assert choose_tokens(torch.tensor(exact)[None], self.position, self.sampling).tokens == [
            11
        ], "the chooser and the judge must mean the same scores"

    def test_the_noise_of_another_position_is_not_used(self):
        exact = self.tied(300, 11, 200, 1e-7)
        rounded = exact + 1e-6 * np.cos(np.arange(300))
        found = judge(exact, [rounded], (11, 200), self.sampling, self.position + 1)
        assert not found.near_tie

    def test_a_token_at_the_border_of_the_nucleus_is_a_near_tie(self):
        """Probabilities 0.5, 0.3, 0.2 and top_p = 0.8: the third is out, but only just."""
        probabilities = np.array([0.5, 0.3, 0.2])
        sampling = Sampling(temperature=1.0, top_p=0.8, seed=1)
        exact = np.log(probabilities)
        winner = next(
            position
            for position in range(1000)
            if np.argmax(exact + gumbel(1, 0, position, torch.arange(3)).numpy()) == 2
        )
        kept = int(np.argmax((exact + gumbel(1, 0, winner, torch.arange(3)).numpy())[:2]))
        close = exact + row(0, 1e-6, -1e-6)
        found = judge(exact, [close], (kept, 2), sampling, winner)
        assert found.near_tie
        far = np.log(np.array([0.5, 0.31, 0.19]))
        found = judge(far, [far + row(0, 1e-6, -1e-6)], (kept, 2), sampling, winner)
        assert not found.near_tie
        assert found.quantity == "top_p"

    def test_a_token_at_the_border_of_top_k_is_a_near_tie(self):
        sampling = Sampling(temperature=1.0, top_k=2, seed=1)
        exact = row(2.0, 1.0, 1.0 - 1e-7, -5.0)
        position = next(
            position
            for position in range(1000)
            if np.argmax(exact + gumbel(1, 0, position, torch.arange(4)).numpy()) == 2
        )
        noisy = exact + gumbel(1, 0, position, torch.arange(4)).numpy()
        other = int(np.argmax(noisy[:2]))
        rounded = exact + row(0, -1e-6, 1e-6, 0)
        assert judge(exact, [rounded], (other, 2), sampling, position).near_tie
        clear = row(2.0, 1.0, 0.9, -5.0)
        found = judge(clear, [clear + row(0, -1e-6, 1e-6, 0)], (other, 2), sampling, position)
        assert not found.near_tie
        assert found.quantity == "top_k"


class TestReference:
    def test_passes_of_every_shape_agree_with_float64(self, target):
        reference = Reference(target, "float32")
        ids = list(range(4, 60))
        exact = reference.exact_logits(ids)
        assert exact.dtype == np.float64
        errors = [np.abs(reference.logits(ids, shape) - exact).max() for shape in (1, 8, 56)]
        assert all(0 < error < 1e-3 for error in errors)

    def test_float64_is_kept_where_the_model_asks_for_float32(self, target):
        """A norm in float32 would leave an error a thousand times the one found here."""
        reference = Reference(target, "float32")
        ids = list(range(4, 60))
        exact = reference.exact_logits(ids)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
        with torch.no_grad():
            half_way = model(torch.tensor([ids])).logits[0, -1].numpy()
        again = Reference(target, "float32").exact_logits([*ids])
        rounding = np.abs(exact - half_way).max()
        assert rounding > 0, "the plain float64 model rounds its norms to float32"
        assert np.abs(exact - again).max() < rounding / 100

    def test_greedy_is_the_argmax_and_ends_with_its_stop_token(self, target):
        reference = Reference(target, "float32")
        prompt = list(range(4, 40))
        answer = reference.greedy(prompt, 12)
        assert 0 < len(answer) <= 12
        for index, token in enumerate(answer):
            logits = reference.logits([*prompt, *answer[:index]], 1)
            assert token == int(logits.argmax())

    def test_bfloat16_passes_have_a_larger_error(self, target):
        ids = list(range(4, 60))
        fine, coarse = Reference(target, "float32"), Reference(target, "bfloat16")
        exact = fine.exact_logits(ids)
        error = np.abs(fine.logits(ids, 8) - exact).max()
        assert np.abs(coarse.logits(ids, 8) - exact).max() > 50 * error


def test_prompts_are_first_turns_through_the_chat_template(target, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"id": "a/1", "turns": ["hello", "more"]}, {"id": "b", "turns": ["x\u2028y"]}]
    texts = [json.dumps(line, ensure_ascii=False) for line in lines]
    file.write_text("\n".join(texts) + "\n\n", encoding="utf-8")
    first, second = read_prompts(file, target)
    assert (first.id, first.text, second.text) == ("a/1", "hello", "x\u2028y")
    assert first.token_ids[0] == 1, "the template opens with <|im_start|>"
    assert len(read_prompts(file, target, 1)) == 1
    file.write_text('{"id": "a"}\n')
    with pytest.raises(ConfigurationError, match="line 1"):
        read_prompts(file, target)
    file.write_text("")
    with pytest.raises(ConfigurationError, match="no prompts"):
        read_prompts(file, target)
    with pytest.raises(ConfigurationError, match="nowhere"):
        read_prompts(tmp_path / "nowhere", target)


def test_a_random_drafter_has_the_same_shapes_and_other_weights(target, tmp_path):
    source = tiny_drafter(tmp_path / "drafter", target)
    folder = write_random_drafter(source, tmp_path / "random")
    before, after = (load_file(path / "model.safetensors") for path in (source, folder))
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    assert not torch.equal(before["fc.weight"], after["fc.weight"])
    assert (folder / "config.json").read_text() == (source / "config.json").read_text()
    with pytest.raises(ConfigurationError, match="safetensors"):
        write_random_drafter(tmp_path, tmp_path / "other")


class TestReport:
    def report(self, **answers: list[list[int]]) -> Report:
        report = Report({}, prompts=2, modes=list(answers), complete=True)
        for mode, tokens in answers.items():
            report.answers[mode] = {
                str(index): Answer(tuple(ids), rounds=2, drafted_tokens=4, acceptance_length=1.5)
                for index, ids in enumerate(tokens)
            }
        return report

    def test_identical_counts_prompts_that_agree_in_all_modes(self):
        report = self.report(off=[[1, 2], [3]], draft=[[1, 2], [3]], other=[[1, 2], [4]])
        assert report.identical == 1
        assert report.as_dict()["modes"]["draft"]["acceptance_length"] == 0.25

    def test_any_difference_or_an_unfinished_run_does_not_pass(self):
        report = self.report(off=[[1], [2]], draft=[[1], [2]])
        assert report.passed
        judgement = Judgement(True, "score", 1e-7, 1e-6)
        report.near_ties.append(Difference("0", "draft", 0, 1, 2, judgement))
        assert report.passed
        report.differences.append(Difference("0", "draft", 0, 1, 2, judgement))
        assert not report.passed
        report.differences.clear()
        report.complete = False
        assert not report.passed

    def test_a_mode_that_never_drafted_shows_nothing(self):
        report = self.report(off=[[1], [2]], draft=[[1], [2]])
        report.answers["draft"] = {
            key: Answer(answer.token_ids) for key, answer in report.answers["draft"].items()
        }
        assert report.undrafted_modes() == ["draft"]
        assert not report.passed

    def test_json_lists_each_difference_with_its_gap_and_bound(self):
        report = self.report(off=[[1], [2]], draft=[[1], [3]])
        judgement = Judgement(True, "score", 1e-7, 1e-6)
        report.near_ties.append(Difference("1", "draft", 0, 2, 3, judgement))
        shown = json.loads(json.dumps(report.as_dict()))
        assert shown["near_ties"] == [
            {
                "prompt_id": "1",
                "mode": "draft",
                "position": 0,
                "base_token": 2,
                "mode_token": 3,
                "quantity": "score",
                "gap": 1e-7,
                "bound": 1e-6,
            }
        ]
        assert {"prompts", "identical", "differences", "modes", "acceptance_length"} <= set(shown)


@pytest.mark.parametrize(
    ("base", "other", "index"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([], [1], 0)],
)
def test_first_difference(base, other, index):
    assert first_difference(base, other) == index
