"""Answers a file of prompts: `flashduet generate --file prompts.jsonl --out answers.jsonl`."""
