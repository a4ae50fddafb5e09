"""Models by their names on the hub, against a real server on the loopback that answers as the hub does.

Commands run as processes with HF_ENDPOINT set to it; nothing of huggingface_hub is replaced.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

import faults
import pico
from commands import BAD_CHECKPOINT, BAD_OUTPUT, BAD_TARGET, Result, Run, assert_refused, runner
from forkserver import Server
from hub_server import TOKEN, Hub, Repo
from lemonx.errors import BadCheckpoint
from lemonx.hub import download, names
from lemonx.verification.card import source_card

HEAD = """# of the source
license: apache-2.0
language: no
base_model: org/tiny
base_model_relation: quantized
tags: [small, lemonx]
model-index:
- name: small
  results: []
datasets:
- books"""
EXTRA = {
    "README.md": f"---\n{HEAD}\n---\n# small\n\nIt reads\tbooks.\n\n---\n",
    "LICENSE": "do what you like",
    "tokenizer_config.json": "{}",
    "tokenizer.json": '{"version": "1.0"}',
    "notes.txt": "not needed",
    "modeling_small.py": "raise SystemExit",
    "model.fp16.safetensors": "another variant",
    "training_args.bin": "a pickle",
    "onnx/model.onnx": "the weights once more",
    "onnx/config.json": "{}",
    "step-100/model.safetensors": "an older save",
}


@dataclass
class Away:
    """The hub, and processes that know no other."""

    hub: Hub
    server: Server
    home: Path
    folder: Path

    def run(self, *arguments: object) -> Result:
        self.hub.seen.clear()
        done = self.server.run(*arguments, cwd=self.folder)
        return Result(done.code, done.out, done.err)

    def log_in(self) -> None:
        (self.home / "token").write_text(TOKEN)

    def forget(self) -> None:
        """An empty cache, and nobody logged in."""
        shutil.rmtree(self.home / "hub", ignore_errors=True)
        (self.home / "token").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with all kinds of files beside it that repositories hold."""
    folder = pico.save(pico.PICO["llama-tied"](), tmp_path_factory.mktemp("small") / "small")
    for name, text in EXTRA.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def processes(
    small: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], tuple[Hub, Server, Path]]]:
    home = tmp_path_factory.mktemp("home")
    warm = pico.save(pico.PICO["llama-tied"](), tmp_path_factory.mktemp("warm") / "small")
    with Hub().serving() as hub:
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",  # its storage has a protocol of its own, which the stand-in does not speak
            "COLUMNS": "200",
        }
        server = Server("expand", warm, warm.parent / "out", "--depth", 3, environment=environment)
        yield lambda: (hub, server, home)
        server.close()


@pytest.fixture
def away(processes: Callable[[], tuple[Hub, Server, Path]], small: Path, tmp_path: Path) -> Away:
    hub, server, home = processes()
    found = Away(hub, server, home, tmp_path)
    found.forget()
    hub.repos, hub.objects, hub.broken = {}, {}, None
    hub.add("org/small", small)
    return found


# ----------------------------------------------------------------- in


def test_a_name_becomes_a_verified_larger_model(away: Away, small: Path, tmp_path: Path) -> None:
    done = away.run("expand", "org/small", "out", "--width", 96, "--depth", 3)
    assert done.code == 0 and done.err == "" and done.out.startswith("wrote out: "), done
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert away.hub.fetched() == wanted | {"LICENSE", "README.md"}
    certificate = json.loads((tmp_path / "out" / "lemonx.json").read_text())
    assert certificate["source"]["name"] == "org/small" and certificate["lossless"]
    assert certificate["source"]["revision"] == away.hub.repos["org/small"].refs["main"]
    head, _, text = (tmp_path / "out" / "README.md").read_text().removeprefix("---\n").partition("\n---\n")
    assert "language: no\n" in head and yaml.safe_load(head) == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "language": False,  # YAML 1.1; the hub reads what was written
        "datasets": ["books"],
        "base_model": "org/small",
        "tags": ["small", "lemonx", "model-expansion"],
    }
    assert "## The card of the source" in text and "# small\n\nIt reads        books." in text
    assert (tmp_path / "out" / "tokenizer.json").read_text() == EXTRA["tokenizer.json"]
    # What it was made from is in the cache as every other library finds it, and nothing is fetched twice.
    kept = away.home / "hub" / "models--org--small" / "snapshots" / certificate["source"]["revision"]
    assert (kept / "model.safetensors").read_bytes() == (small / "model.safetensors").read_bytes()
    again = away.run("verify", "org/small", "out")
    assert again.code == 0 and "the same function" in again.out and not away.hub.fetched() - {"config.json"}
    # The folder in the cache is the same source, and known by its name.
    other = away.run("expand", kept, "other", "--depth", 3, "--no-verify")
    assert other.code == 0, other
    assert "base_model: org/small\n" in (tmp_path / "other" / "README.md").read_text()


@pytest.mark.parametrize(
    "head",
    [
        "a: &x 1\nb: *x",
        "{license: mit}",
        "license: [",
        "[" * 5000,
        "license: mit\nlicense: gpl",
        "? [1]\n: 2",
        "a: \x1b",
        "",
    ],
)
def test_a_head_that_cannot_be_cut_is_left_out(head: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\nthe text")
    card = source_card(tmp_path)
    assert yaml.safe_load(card.head(None)) == {"library_name": "transformers", "tags": ["lemonx", "model-expansion"]}
    assert card.section().endswith("\n\nthe text\n")


@pytest.mark.parametrize("head", ["license: mit\na: &x 1\nb: *x", "license: mit\na: [", "license: mit\n1: 2\n1: 3"])
def test_a_licence_is_kept_all_the_same(head: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\nthe text")
    assert yaml.safe_load(source_card(tmp_path).head(None))["license"] == "mit"


def test_shards_and_no_others(away: Away, good: Callable[..., Path], tmp_path: Path) -> None:
    source = shutil.copytree(good(), tmp_path / "source")
    (source / "consolidated.safetensors").write_text("the same weights once more")
    away.hub.add("org/sharded", source)
    # A plan reads headers, so nothing else of the weights is fetched, nor kept.
    planned = away.run("plan", "org/sharded", "--depth", 3, "--json")
    assert planned.code == 0 and json.loads(planned.out)["lossless"], planned
    assert not list((away.home / "hub").rglob("*.safetensors"))
    local = json.loads(away.run("plan", source, "--depth", 3, "--json").out)
    assert {**json.loads(planned.out), "source": ""} == {**local, "source": ""}
    done = away.run("expand", "org/sharded", "out", "--depth", 3, "--no-verify")
    assert done.code == 0, done
    assert {name for name in away.hub.fetched() if name.endswith(".safetensors")} == {
        file.name for file in good().glob("model-*.safetensors")
    }


def test_revisions(away: Away, small: Path) -> None:
    repo = away.hub.repos["org/small"]
    first = repo.refs["main"]
    config = json.loads(repo.files["config.json"])
    changed = {**repo.files, "config.json": json.dumps({**config, "rms_norm_eps": 1e-3}).encode()}
    repo.refs["v1"] = first
    second = repo.commit(changed)
    for revision, commit in (("@v1", first), (f"@{first}", first), ("", second), ("@main", second)):
        done = away.run("plan", f"org/small{revision}", "--depth", 3, "--json")
        assert done.code == 0 and json.loads(done.out)["source"].endswith(commit), done
    # A branch that moved on is followed; a commit that is cached needs no network.
    assert away.run("fsck", f"org/small@{first}", "--quick").code == 0
    assert away.run("plan", f"org/small@{first}", "--depth", 3).code == 0
    assert away.hub.seen == []


def test_like_needs_only_the_config(away: Away, good: Callable[..., Path], tmp_path: Path) -> None:
    small = good()
    config = json.loads((small / "config.json").read_text())
    large = {**config, "hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 200}
    repo = away.hub.repos["org/large"] = Repo()
    repo.commit({"config.json": json.dumps(large).encode(), "model.safetensors": b"never read"})
    done = away.run("plan", small, "--like", "org/large", "--json")
    assert done.code == 0 and json.loads(done.out)["config"]["hidden_size"] == [48, 96], done
    assert away.hub.fetched() == {"config.json"}
    assert_refused(away.run("plan", small, "--like", "org/none"), BAD_TARGET, "--like 'org/none' is neither a folder")


def test_a_folder_of_that_name_wins(away: Away, good: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(good(), tmp_path / "org" / "small")
    done = away.run("plan", "org/small", "--depth", 3, "--json")
    assert done.code == 0 and json.loads(done.out)["source"] == str(tmp_path / "org" / "small")
    assert away.hub.seen == []
    assert_refused(away.run("plan", "./org/none", "--depth", 3), BAD_CHECKPOINT, "'org/none' does not exist")
    assert away.hub.seen == []


def test_an_adapter_by_its_name(away: Away, tmp_path: Path) -> None:
    """Its base is looked for where it is kept; what a file of others says leads to no download."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    settings = {"peft_type": "LORA", "base_model_name_or_path": "org/small", "r": 2, "lora_alpha": 2}
    weights = save({f"{name}_A.weight": torch.ones(2, 48), f"{name}_B.weight": torch.ones(48, 2)})
    repo = away.hub.repos["org/lora"] = Repo()
    repo.commit({"adapter_config.json": json.dumps(settings).encode(), "adapter_model.safetensors": weights})
    command = ("expand", "org/lora", "out", "--depth", 3, "--no-verify")
    assert_refused(away.run(*command), BAD_CHECKPOINT, "is an adapter of 'org/small', .* give the base as SOURCE")
    assert "org/small" not in str(away.hub.seen)
    done = away.run("expand", "org/small", "out", "--depth", 3, "--adapter", "org/lora")
    assert done.code == 0, done
    said = json.loads((tmp_path / "out" / "lemonx.json").read_text())
    assert said["source"]["name"] == "org/small" and "the adapter 'org/lora' (" in said["source"]["converted"]
    assert away.run(*command, "--force").code == 0  # now it is in the cache


def test_private_and_gated(away: Away, small: Path) -> None:
    away.hub.add("org/private", small, private=True)
    away.hub.add("org/gated", small, gated=True)
    command = ("--depth", 3)
    assert_refused(
        away.run("plan", "org/private", *command), BAD_CHECKPOINT, "nor a model on the hub: check.*hf auth login"
    )
    assert_refused(away.run("plan", "org/gated", *command), BAD_CHECKPOINT, "is gated on the hub: ask for access")
    away.log_in()
    assert away.run("plan", "org/private", *command).code == 0
    assert away.run("plan", "org/gated", *command).code == 0


def test_what_is_refused_in_one_line(away: Away, good: Callable[..., Path], tmp_path: Path) -> None:
    hub = away.hub
    pickled = faults.save_sharded("llama-tied", tmp_path / "pickled")
    for file in pickled.glob("*.safetensors*"):
        file.unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"")
    hub.add("org/pickled", pickled)
    hub.add("org/other", good(), but=tuple(f.name for f in good().glob("*.safetensors*")))
    hub.repos["org/other"].files["model.gguf"] = b"GGUF"
    hub.add("org/torn", good(), but=(min(f.name for f in good().glob("model-*")),))
    hub.repos["org/empty"] = Repo()
    hub.repos["org/empty"].commit({"README.md": b""})
    for name, says in (
        ("org/none", "'org/none' is neither a folder nor a model on the hub: check the name"),
        ("org/small@v9", "'org/small@v9' is on the hub, but has no revision 'v9': give a branch"),
        ("org/pickled", "has no safetensors on the hub, only pytorch_model.bin: use --allow-pickle"),
        ("org/other", "neither model.safetensors nor .* on the hub .but model.gguf.: download one of its files"),
        ("org/torn", "has an index that names 'model-00001-of-00004.safetensors', which is not there"),
        ("org/empty", "'org/empty' has no config.json on the hub"),
    ):
        assert_refused(away.run("expand", name, "out", "--depth", 3), BAD_CHECKPOINT, says)
        assert not (tmp_path / "out").exists()
    hub.broken = "/resolve/.*safetensors"
    assert_refused(
        away.run("plan", "org/small", "--depth", 3), BAD_CHECKPOINT, "from the hub .403 Forbidden: out of order"
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


def test_offline(away: Away, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(away.home / "hub"))
    says = "nor in the hub's cache, and HF_HUB_OFFLINE .*: unset it"
    for command in (("plan", "org/small"), ("expand", "org/small", "out")):
        assert_refused(run(*command, "--depth", 3), BAD_CHECKPOINT, says)
    away.run("plan", "org/small", "--depth", 3)
    assert_refused(run("expand", "org/small", "out", "--depth", 3), BAD_CHECKPOINT, "in the hub's cache only in part")
    away.run("fsck", "org/small", "--quick")
    assert run("plan", "org/small", "--depth", 3).code == 0
    assert run("expand", "org/small", "out", "--depth", 3, "--no-verify").code == 0
    assert_refused(run("expand", "org/small", "o", "--depth", 3, "--push", "a/b"), BAD_TARGET, "HF_HUB_OFFLINE is set")


def test_a_hub_that_does_not_answer_is_asked_once(away: Away, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is closed: no seconds of waiting, the cause in the message, and what is cached is used."""
    away.run("fsck", "org/small", "--quick")  # downloads it
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(away.home / "hub"))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    begin = time.monotonic()
    with pytest.raises(BadCheckpoint, match=r"'org/none' is no folder, and the hub cannot be reached \(\[Errno 111\]"):
        download.located_config("org/none")
    assert time.monotonic() - begin < 3
    assert (download.located_config("org/small") / "config.json").exists()


# ----------------------------------------------------------------- out


def test_push(away: Away, tmp_path: Path) -> None:
    away.log_in()
    done = away.run("expand", "org/small", "out", "--depth", 3, "--push", "me/large")
    assert done.code == 0 and done.out.endswith(f"uploaded to {away.hub.url}/me/large\n"), done
    repo = away.hub.repos["me/large"]
    assert repo.private and "lemonx" in repo.messages[-1]
    written = {
        str(f.relative_to(tmp_path / "out")): f.read_bytes() for f in (tmp_path / "out").rglob("*") if f.is_file()
    }
    assert {name: data for name, data in repo.files.items() if name != ".gitattributes"} == written
    assert b"base_model: org/small\n" in written["README.md"]
    # What was uploaded can be verified, and grown again, by its name.
    again = away.run("verify", "org/small", "me/large")
    assert again.code == 0 and "the same function" in again.out and "lemonx.json" in away.hub.fetched(), again
    # A source that is not of the hub: the card names the model there that the source comes from.
    again = away.run("expand", "out", "more", "--depth", 4, "--push", "me/large", "--no-verify", "--json")
    assert again.code == 0 and json.loads(again.out)["pushed"] == f"{away.hub.url}/me/large", again
    assert b"base_model: org/small\n" in repo.files["README.md"] and len(repo.commits) == 3


def test_a_push_that_cannot_be_is_refused_before_the_work(away: Away, tmp_path: Path) -> None:
    command = ("expand", "org/small", "out", "--depth", 3, "--no-verify", "--push")
    assert_refused(away.run(*command, "me/large"), BAD_TARGET, "--push cannot log in to the hub .*: log in with")
    (away.home / "token").write_text("hf_an_old_one")
    assert_refused(away.run(*command, "me/large"), BAD_TARGET, "--push cannot log in to the hub")
    for odd in ("large", "me/../x", "me/large@v1", "a/b/c"):
        assert_refused(away.run(*command, odd), BAD_TARGET, "is not a name on the hub: write it as org/name")
    assert not (tmp_path / "out").exists()


def test_a_push_that_fails_keeps_the_output(away: Away, tmp_path: Path) -> None:
    away.log_in()
    command = ("expand", "org/small", "out", "--depth", 3, "--no-verify", "--force", "--push")
    for repo, broken in (("others/large", None), ("me/large", "/commit/main")):
        away.hub.broken = broken
        done = away.run(*command, repo)
        assert done.code == BAD_OUTPUT and "hf upload" in done.err and len(done.err.splitlines()) == 1, done
        assert (tmp_path / "out" / "model.safetensors").exists()


# ----------------------------------------------------------------- names


@given(st.text("ab-_.@/0\\~ \n", max_size=12))
def test_no_name_leaves_the_cache(text: str) -> None:
    found = names.parse(text)
    if found is None:
        return
    cache = Path("/cache")
    kept = f"models--{found.repo.replace('/', '--')}"
    for path in (cache / kept / "snapshots" / found.revision, cache / kept / "refs" / found.revision):
        assert ".." not in path.parts and path.resolve().is_relative_to(cache / kept)
    assert names.name_of(cache / kept / "snapshots" / "0123") == found.repo
