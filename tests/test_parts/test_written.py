"""The program of one part: it agrees with the model, and reads like one written by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPT, loss_fn
from pdcompile.errors import ConfigError
from pdcompile.ir.graph import Affine, OpGraph
from pdcompile.ir.records import CONVERSIONS
from pdcompile.passes.codegen import write as dump
from pdcompile.passes.costs import estimate
from pdcompile.passes.parts.layout import SPREAD, SUM, WHOLE, Layout, conversion
from tests.helpers.in_parts import InParts, compare, written
from tests.helpers.launch import torchrun

FP64, FP32 = 1e-10, 2e-5
GOLDEN = Path(__file__).parents[1] / "golden"


def tokens(seed: int, length: int = 16, vocabulary: int = 96) -> Tensor:
    return torch.randint(vocabulary, (4, length), generator=torch.Generator().manual_seed(seed))


def of_logits(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def gpt(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return GPT(2, 64, 4, 16).to(dtype)


def hugging_face(name: str, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> Any:
    """A small model of transformers, with a vocabulary of 96."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "Llama": {
            "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
        },
        "GPT2": {
            "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": dropout,
            "embd_pdrop": dropout, "attn_pdrop": dropout, "bos_token_id": 0, "eos_token_id": 0,
        },
    }  # fmt: skip
    kind = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel"}[name]
    config = getattr(transformers, f"{name}Config")(vocab_size=96, use_cache=False, **sizes[name])
    return getattr(transformers, kind)(config).to(dtype)


@cache
def gpt_in_parts(family: Any, stages: int = 1, dtype: torch.dtype = torch.float64) -> InParts:
    return written(gpt(dtype), tokens(0), tokens(1), loss_fn, family=family, stages=stages)


@cache
def llama_by_width(dtype: torch.dtype) -> InParts:
    model = hugging_face("Llama", dtype)
    return written(model, {"input_ids": tokens(0)}, tokens(1), of_logits)


def agree(it: InParts, tolerance: float, call: Any) -> None:
    compare(it, call, tolerance)
    compare(it, call, tolerance, training=False)


@pytest.mark.parametrize("family", ["width", "sequence", "width+sequence"])
def test_gpt_with_fused_qkv_and_tied_head(family: str) -> None:
    it = gpt_in_parts(family)
    agree(it, FP64, lambda: loss_fn(it.model(tokens(0)), tokens(1)))
    used = {op.target for op in it.capture.train.ops} & CONVERSIONS
    assert used
    twins = [op.target for op in it.capture.eval.ops if op.target in CONVERSIONS]
    assert twins == [op.target for op in it.capture.train.ops if op.target in CONVERSIONS]
    assert "if self.training" not in it.sources.files["stage_0.py"]


def test_two_stages_may_be_cut_inside_of_what_is_split() -> None:
    it = gpt_in_parts("width", 2, torch.float32)
    compare(it, lambda: loss_fn(it.model(tokens(0)), tokens(1)), FP32)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param(torch.float64, 1e-7, marks=pytest.mark.slow),  # norms in float32
        (torch.float32, FP32),
    ],
)
def test_an_unmodified_llama(dtype: torch.dtype, tolerance: float) -> None:
    it = llama_by_width(dtype)
    agree(it, tolerance, lambda: of_logits(it.model(input_ids=tokens(0)), tokens(1)))
    assert it.shards


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FP64), (torch.float32, FP32)])
def test_an_unmodified_gpt2(dtype: torch.dtype, tolerance: float) -> None:
    model = hugging_face("GPT2", dtype)
    it = written(model, {"input_ids": tokens(0)}, tokens(1), of_logits)
    agree(it, tolerance, lambda: of_logits(model(input_ids=tokens(0)), tokens(1)))
    assert it.shards


@pytest.mark.slow
def test_dropout_of_a_split_value_drops_what_the_model_drops() -> None:
    model = hugging_face("GPT2", dropout=0.1)
    it = written(model, {"input_ids": tokens(0)}, tokens(1), of_logits)
    agree(it, FP64, lambda: of_logits(model(input_ids=tokens(0)), tokens(1)))
    assert len(it.program.notes) == 2  # attention, once a layer
    assert "drops out: attention is written out" in str(it.program)


class InPlace(nn.Module):
    """Writes into what is split, and into what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x))
        hidden = self.up(x) + hidden
        hidden += 1
        out = self.down(hidden)
        out += x
        return out.mul_(2)


def test_writes_in_place() -> None:
    torch.manual_seed(0)
    model, x, y = InPlace().double(), torch.randn(4, 32).double(), torch.tensor([1, 2, 3, 31])
    it = written(model, x, y, F.cross_entropy)
    agree(it, FP64, lambda: F.cross_entropy(model(x), y))
    assert it.shards


class Grouped(nn.Module):
    """Attention of grouped queries, in which weights drop out."""

    def __init__(self, causal: bool, mask: str) -> None:
        super().__init__()
        self.q, self.kv, self.proj = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 64)
        self.causal, self.mask = causal, mask
        self.register_buffer("seen", torch.rand(12, 12) < 0.7)
        self.register_buffer("bias", torch.randn(4, 12, 12))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, 4, 16).transpose(1, 2)
        k, v = (one.view(b, s, 2, 8).transpose(1, 2) for one in self.kv(x).chunk(2, -1))
        k, v = torch.cat([k, k], -1), torch.cat([v, v], -1)
        mask = {"": None, "bool": self.seen, "float": self.bias}[self.mask]
        p = 0.3 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=p, is_causal=self.causal, enable_gqa=True
        )
        return self.proj(mixed.transpose(1, 2).reshape(b, s, 64)).mean(1)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("causal", "mask"), [(True, ""), (False, "bool"), (False, "float")])
def test_attention_that_drops_out_is_written_out(causal: bool, mask: str) -> None:
    torch.manual_seed(0)
    model, x, y = Grouped(causal, mask).double(), torch.randn(4, 12, 64).double(), tokens(0)[:, 0]
    y %= 64
    it = written(model, x, y, F.cross_entropy)
    compare(it, lambda: F.cross_entropy(model(x), y), FP64)
    training = it.sources.files["stage_0.py"].split("if self.training")[1].split("return")[0]
    assert "F.scaled_dot" not in training
    assert "split=1" in training


class Wide(nn.Module):
    """An MLP whose hidden units drop out, and a convolutional net in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(4, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16),
            nn.BatchNorm2d(16), nn.Conv2d(16, 32, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.up, self.down, self.drop = nn.Linear(32, 256), nn.Linear(256, 32), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x + self.down(self.drop(F.relu(self.up(x))))


def test_hidden_units_drop_out_and_channels_are_split() -> None:
    torch.manual_seed(0)
    model = Wide().double()
    x, y = torch.randn(4, 4, 8, 8, dtype=torch.float64), torch.randint(32, (4,))
    it = written(model, x, y, F.cross_entropy)
    agree(it, FP64, lambda: F.cross_entropy(model(x), y))
    assert "up.weight" in it.shards
    assert "own(self.drop(" in it.sources.files["stage_0.py"]


class Circular(nn.Module):
    """A convolution that only runs as a module, where the sum over parts has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Conv2d(4, 64, 3, bias=False), nn.BatchNorm2d(64)
        self.down = nn.Conv2d(64, 4, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.norm(self.up(x)))).mean((2, 3))


def test_a_module_that_no_function_replaces_stays_whole_and_says_so() -> None:
    torch.manual_seed(0)
    model = Circular().double()
    x, y = torch.randn(4, 4, 8, 8, dtype=torch.float64), torch.randint(4, (4,))
    it = written(model, x, y, F.cross_entropy)
    agree(it, FP64, lambda: F.cross_entropy(model(x), y))
    assert "no function does what this module does" in str(it.layouts)
    assert "up.weight" in it.shards


class Viewed(nn.Module):
    """Attention whose result is viewed as it lies in memory, without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (one.view(b, s, 4, 16).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v) + q
        return x + self.proj(mixed.transpose(1, 2).view(b, s, 64))


class Scored(Viewed):
    """Scores by hand, in a view whose two last dimensions are the same sequence."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        qkv = (one.view(b, s, 4, 16).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        q, k, v = (one.reshape(b * 4, s, 16) for one in qkv)
        scores = torch.bmm(q, k.transpose(1, 2)).view(b, 4, s, s).softmax(-1)
        mixed = torch.bmm(scores.view(b * 4, s, s), v).view(b, 4, s, 16)
        return x + self.proj(mixed.transpose(1, 2).reshape(b, s, 64))


@pytest.mark.parametrize("family", ["width", "context"])
def test_a_view_of_scores_keeps_queries_and_keys_apart(family: Any) -> None:
    torch.manual_seed(0)
    model, x = Scored().double(), torch.randn(4, 12, 64).double()
    it = written(model, x, x, F.mse_loss, family=family)
    agree(it, FP64, lambda: F.mse_loss(model(x), x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["width", "sequence", "width+sequence"])
def test_a_view_of_what_was_converted_does_not_ask_how_it_lies(family: Any) -> None:
    torch.manual_seed(0)
    model, x = Viewed().double(), torch.randn(4, 12, 64).double()
    it = written(model, x, x, F.mse_loss, family=family)
    agree(it, FP64, lambda: F.mse_loss(model(x), x))


@pytest.mark.parametrize("family", ["width", "sequence"])
@pytest.mark.parametrize("name", ["GPT", pytest.param("Llama", marks=pytest.mark.slow)])
def test_four_parts(name: str, family: Any) -> None:
    if name == "GPT":
        it = written(gpt(), tokens(0), tokens(1), loss_fn, family=family, parts=4)
        agree(it, FP64, lambda: loss_fn(it.model(tokens(0)), tokens(1)))
        return
    model = hugging_face(name)
    if family == "sequence":
        with pytest.raises(ConfigError, match="has 2 heads, which 4 parts cannot share"):
            written(model, {"input_ids": tokens(0)}, tokens(1), of_logits, family=family, parts=4)
        return
    it = written(model, {"input_ids": tokens(0)}, tokens(1), of_logits, family=family, parts=4)
    agree(it, 1e-7, lambda: of_logits(model(input_ids=tokens(0)), tokens(1)))


RANKS = """
    import torch, torch.distributed as dist
    from examples.gpt import loss_fn
    from pdcompile.parts.conversions import Group, using
    from tests.helpers.in_parts import compare_found, run_part
    from tests.test_parts.test_written import FP64, gpt_in_parts, tokens

    dist.init_process_group("gloo")
    for family in ("width", "width+sequence"):
        it = gpt_in_parts(family)
        with using(Group()):
            found = [None, None]
            dist.all_gather_object(found, run_part(it, dist.get_rank(), training=True))
        compare_found(it, found, lambda: loss_fn(it.model(tokens(0)), tokens(1)), FP64)
    print(f"rank {dist.get_rank()} agrees")
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_run_what_was_written(tmp_path: Path) -> None:
    run = torchrun(RANKS, 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count("agrees") == 2


# What was written.


@pytest.mark.parametrize("name", ["gpt_by_width", "gpt_by_sequence", "llama_by_width"])
def test_stages_in_parts_read_like_ones_written_by_hand(name: str) -> None:
    """Golden files; write them anew with PDCOMPILE_GOLDEN=write and read the difference."""
    family: Any = name.partition("_by_")[2]
    if name.startswith("gpt"):
        it = gpt_in_parts(family, dtype=torch.float32)
    else:
        it = llama_by_width(torch.float32)
    text, golden = it.sources.files["stage_0.py"], GOLDEN / f"{name}_stage_0.py"
    if os.environ.get("PDCOMPILE_GOLDEN") == "write":
        golden.write_text(text)
    assert text.splitlines() == golden.read_text().splitlines()


def test_the_graph_is_an_ordinary_one() -> None:
    it = gpt_in_parts("width")
    graph = it.capture.train
    assert OpGraph.from_json(graph.to_json()) == graph
    assert len(estimate(graph, microbatch_size=2)) == len(graph.ops)
    names = [op.name for op in graph.ops]
    assert len(set(names)) == len(names)
    added = {op.name for op in graph.ops if op.target in CONVERSIONS}
    assert added <= {*it.program.belongs, *it.program.belongs.values()}
    by_name = {op.name: op for op in graph.ops}
    for name, of in it.program.belongs.items():
        assert by_name[name].source == by_name[of].source
    for fqn, shard in it.shards.items():
        whole = dict(it.model.named_parameters(remove_duplicate=False))[fqn]
        assert graph.tensors[fqn].shape == shard.local_shape(whole.shape)


def test_values_have_the_shapes_that_they_are_said_to_have() -> None:
    """Shapes are those on meta tensors, by one part alone: conversions let shapes through."""
    from pdcompile.ir.execution import Lookup, execute
    from pdcompile.parts.conversions import Alone, using
    from pdcompile.passes.codegen import stage_classes

    for family in ("width", "sequence", "width+sequence"):
        it = gpt_in_parts(family)
        graph, b = it.capture.train, 4
        with torch.device("meta"):
            (stage,) = [cls() for cls in stage_classes(it.sources)]
        inputs = {
            one.name: torch.zeros(4, 16, dtype=torch.int64, device="meta") for one in graph.inputs
        }
        lookup = Lookup(stage, b, torch.device("meta"))
        with using(Alone(2)), torch.no_grad():
            values = execute(graph, inputs, lookup)
        for name, value in graph.values.items():
            if value.is_tensor:
                shape = tuple(n.at(b) if isinstance(n, Affine) else n for n in value.shape)
                assert tuple(values[name].shape) == shape, name


def test_a_dumped_folder_runs_its_parts_without_pdcompile(tmp_path: Path) -> None:
    it = gpt_in_parts("width", 2, torch.float32)
    losses = _losses_of_folder(it, tmp_path)
    assert losses[0] == losses[1]


def test_a_dumped_folder_has_each_parts_slice_of_buffers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Circular()
    model.norm.running_mean = torch.arange(64.0)
    x, y = torch.randn(4, 4, 8, 8), torch.randint(4, (4,))
    it = written(model, x, y, F.cross_entropy)
    dump(it.sources, tmp_path, model=it.model)
    saved = torch.load(tmp_path / "stage_0.pt", weights_only=True)
    assert [one.tolist() for one in saved["norm.running_mean"]] == [[*range(32)], [*range(32, 64)]]


def _losses_of_folder(it: InParts, folder: Path) -> list[str]:
    dump(it.sources, folder, model=it.model)
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.modules['pdcompile'] = None\n", encoding="utf-8"
    )
    run = subprocess.run(
        [sys.executable, "pipeline.py"], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    losses = [line for line in run.stdout.splitlines() if line.startswith("loss")]
    assert len(losses) == 2
    return losses


def test_variables_keep_clear_of_the_conversions_names() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)

        def forward(self, total: Tensor) -> Tensor:
            spread = F.relu(self.up(total))
            own = self.down(spread)
            return total + own * own

    torch.manual_seed(0)
    model, x, y = Model().double(), torch.randn(4, 32).double(), torch.randint(32, (4,))
    it = written(model, x, y, F.cross_entropy)
    agree(it, FP64, lambda: F.cross_entropy(model(x), y))


# Layouts.


@pytest.mark.parametrize(
    ("have", "want", "said"),
    [
        (WHOLE, SPREAD, ("spread", (), ())),
        (SUM, WHOLE, ("total", (), ())),
        (SUM, SPREAD, ("total", (), ())),
        (Layout("S", 1, (8,), 0), WHOLE, ("gather", (1,), ())),
        (Layout("S", 1, (3, 8), 1), SPREAD, ("gather", (1,), (("runs", 3), ("spread", True)))),
        (WHOLE, Layout("S", 0, (Affine(1), 8), 1), ("own", (0,), (("runs", Affine(1)),))),
        (SUM, Layout("S", 1, (8,), 0), ("scatter", (1,), ())),
        (Layout("S", 1, (8,), 0), Layout("S", 2, (3, 8), 1), ("swap", (1, 2), (("new_runs", 3),))),
        (WHOLE, WHOLE, None),
        (SPREAD, SPREAD, None),
    ],
)
def test_conversions_of_layouts(have: Layout, want: Layout, said: Any) -> None:
    found = conversion(have, want)
    assert found is None if said is None else tuple(found or ()) == said
