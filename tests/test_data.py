"""Prompts to responses: sources and mixtures, decontamination, engines, conversations, and runs that are killed."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset

from dflare.commands.data import parse_shard, shard_file
from dflare.commands.main import main
from dflare.configuration.arguments import parse_sources
from dflare.training.data import load_responses, to_sequences
from dflare.training.decontaminate import NGRAM, BenchmarkIndex, gram_hashes
from dflare.training.engines import Decoding, ServerEngine, TransformersEngine
from dflare.training.prompts import Prompt, in_shard, read_prompts, read_source, stream_prompts, to_prompt
from dflare.training.regenerate import Conversations
from dflare.training.store import SCHEMA, ResponseStore, conversation_of, read_rows, turn_id
from helpers import WORDS, greedy, word_tokenizer


def conversations(tokenizer, target, limit=15, max_prompt_tokens=60, temperature=0.0, **options) -> Conversations:
    engine = TransformersEngine(target, Decoding(limit, temperature))
    return Conversations(tokenizer, lambda: engine, temperature, max_prompt_tokens, **options)


def jsonl(path, rows) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "prompts.jsonl:1: not JSON"),
        ('{"id": "a"}', "prompts.jsonl:1: expected"),
        ('{"id": "a", "turns": []}', "prompts.jsonl:1: expected"),
        ('{"id": "a", "turns": ["x"]}\n{"id": "a", "turns": ["y"]}', "two rows are called prompts/a"),
    ],
)
def test_bad_prompt_files_name_the_line(tmp_path, text, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text + "\n")
    with pytest.raises(ValueError, match=message):
        read_prompts([file])


def test_line_separators_inside_text_do_not_end_a_row(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"id": "a", "turns": ["x\u2028y\x85z"]}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_prompts([file]) == [Prompt("prompts/a", ("x\u2028y\x85z",))]


@pytest.mark.parametrize(
    ("row", "columns", "turns", "system"),
    [
        ({"question": " Why? "}, ["question"], ("Why?",), None),
        ({"instruction": "Add.", "input": "1 2"}, ["instruction", "input"], ("Add.\n\n1 2",), None),
        ({"instruction": "Add.", "input": ""}, ["instruction", "input"], ("Add.",), None),
        ({"turns": ["a", "b"]}, ["turns"], ("a", "b"), None),
        (
            {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a"},
                          {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}]},
            ["messages"], ("a", "b"), "Be kind.",
        ),
        ({"c": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}]}, ["c"], ("a",), None),
        ({"m": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]}, ["m"], ("a",), None),
    ],
)  # fmt: skip
def test_rows_of_every_form_become_prompts(row, columns, turns, system):
    (source,) = parse_sources([{"path": "x", "columns": columns}])
    assert to_prompt("i", row, source) == Prompt("i", turns, system)


def test_rows_without_a_user_are_left_out_and_missing_columns_named():
    (source,) = parse_sources([{"path": "x", "columns": ["messages"]}])
    assert to_prompt("i", {"messages": [{"role": "assistant", "content": "x"}]}, source) is None
    assert to_prompt("i", {"messages": None}, source) is None
    with pytest.raises(ValueError, match="x has no column 'messages'; it has text"):
        to_prompt("i", {"text": "a"}, source)


def test_mixtures_take_their_shares_in_an_order_that_the_seed_decides(tmp_path):
    pq.write_table(pa.table({"text": [f"a{i}" for i in range(50)]}), tmp_path / "a.parquet")
    jsonl(tmp_path / "b.jsonl", [{"text": f"b{i}"} for i in range(50)])
    whole = jsonl(tmp_path / "c.jsonl", [{"id": str(i), "turns": [f"c{i}"]} for i in range(5)])
    entries = [
        {"path": str(tmp_path / "a.parquet"), "columns": ["text"], "share": 3},
        {"path": str(tmp_path / "b.jsonl"), "columns": ["text"], "share": 1},
    ]

    def draw(seed, num_prompts):
        return list(stream_prompts([whole], parse_sources(entries), seed, num_prompts))

    drawn, other = draw(0, 20), draw(1, 20)
    assert sorted(prompt.turns[0] for prompt in drawn[:5]) == [f"c{i}" for i in range(5)]
    assert [prompt.turns[0][0] for prompt in drawn[5:]].count("b") in (3, 4, 5) and len(drawn) == 20
    assert draw(0, 20) == drawn != other
    by_id = {prompt.id: prompt.turns for prompt in drawn}
    assert all(by_id.get(prompt.id, prompt.turns) == prompt.turns for prompt in other)  # ids name rows, not places
    with pytest.raises(ValueError, match="num_prompts is missing"):
        draw(0, None)


def test_rows_of_several_files_are_told_apart_by_their_content(tmp_path):
    for name in "abcd":
        jsonl(tmp_path / "many" / f"{name}.jsonl", [{"text": f"{name}{i}"} for i in range(5)] + [{"text": "same"}])
    source = parse_sources([{"path": str(tmp_path / "many"), "columns": ["text"]}])[0]
    first, second = ({prompt.id: prompt.turns for prompt in read_source(source, seed)} for seed in (0, 1))
    assert first == second and len(first) == 21 and len(set(first.values())) == 21
    assert len(list(read_source(source, 0))) == 21  # none twice


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "x", "shares": 1}, r"sources\[0\]: unknown key 'shares'; did you mean 'share'"),
        ({"split": "train"}, r"sources\[0\].path is missing"),
        ({"path": "x", "share": 0.0}, r"sources\[0\].share is 0.0; the least is"),
        ({"path": "x", "format": "Please"}, r"sources\[0\].format is 'Please', without"),
        ({"path": "x", "share": "much"}, r"sources\[0\].share: expected float, found 'much'"),
    ],
)
def test_bad_sources_name_the_field(entry, message):
    with pytest.raises(ValueError, match=message):
        parse_sources([entry])


def test_sources_that_would_share_their_ids_are_refused(tmp_path):
    entries = [{"path": f"{place}/a.jsonl", "columns": ["text"]} for place in (tmp_path, tmp_path / "sub")]
    with pytest.raises(ValueError, match=r"sources\[1\] is called 'a-train', as sources\[0\] is"):
        parse_sources(entries)
    named = parse_sources([entries[0], {**entries[1], "name": "b"}, {**entries[1], "format": "Say {}"}])
    assert len({source.title for source in named}) == 3
    whole = jsonl(tmp_path / "b.jsonl", [{"id": "1", "turns": ["x"]}])
    with pytest.raises(ValueError, match="one is called 'b', as a file of prompts is"):
        list(stream_prompts([whole], named, 0))


@pytest.mark.parametrize("value", [7, [1, 2], {"text": "x"}, [["x"]]])
def test_columns_without_texts_are_said(value):
    (source,) = parse_sources([{"path": "x", "columns": ["number"]}])
    with pytest.raises(ValueError, match="sources: x holds .* in number; a text"):
        to_prompt("id", {"number": value}, source)


def test_shards_share_all_prompts_out(tmp_path):
    ids = [f"p{i}" for i in range(200)]
    parts = [{id for id in ids if in_shard(id, (k, 3))} for k in (1, 2, 3)]
    assert sum(map(len, parts)) == 200 and set.union(*parts) == set(ids) and min(map(len, parts)) > 30
    assert shard_file("d/out.parquet", "2/8") == "d/out-00002-of-00008.parquet"
    for wrong in ("0/3", "4/3", "x", "3"):
        with pytest.raises(ValueError, match="expected K/N"):
            parse_shard(wrong)


# ------------------------------------------------------------------------------------------------- decontamination


def test_benchmark_prompts_are_found_short_and_long(tokenizer):
    long = " ".join(WORDS[:40])
    prompts = [
        Prompt("inside", ("w50 w51 " + " ".join(WORDS[3:36]) + " w52",)),
        Prompt("short", ("W7, w8!",)),
        Prompt("31 tokens", (" ".join(WORDS[:31]),)),
        Prompt("across", (" ".join(WORDS[:20]), " ".join(WORDS[20:40]))),
        Prompt("second turn", ("w1", "w7 w8")),
        Prompt("system", ("w1",), system=long),
        Prompt("clean", ("w1 w2",)),
    ]
    index = BenchmarkIndex({"one": [long], "two": ["w7 w8", long]}, tokenizer)
    hits = {hit.id: (hit.reason, hit.benchmarks) for hit in index.find(prompts) if hit}
    both = ("one", "two")
    assert hits == {
        "inside": ("32-gram", both),
        "short": ("identical", ("two",)),
        "second turn": ("identical", ("two",)),
        "system": ("identical", both),
    }
    assert index.counts == {
        ("one", "32-gram"): 1, ("two", "32-gram"): 1, ("two", "identical"): 3, ("one", "identical"): 1
    }  # fmt: skip


def test_hashed_runs_are_those_of_a_plain_comparison(tokenizer):
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS[:2], k=draw.randrange(0, 60))) for _ in range(60)]
    index = BenchmarkIndex({"b": texts[:20]}, tokenizer)

    def runs(text):
        words = text.split()
        return {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}

    known = set().union(*map(runs, texts[:20]))
    hits = index.find([Prompt(str(i), (text,)) for i, text in enumerate(texts)])
    assert [bool(hit) for hit in hits] == [i < 20 and bool(t) or bool(runs(t) & known) for i, t in enumerate(texts)]
    assert len(gram_hashes(np.arange(31))) == 0 and len(gram_hashes(np.arange(33))) == 2


# ------------------------------------------------------------------------------------------------- conversations


def test_the_masked_tokens_are_what_the_target_generated(talker, tokenizer):
    prompts = [Prompt("a", ("w1 w2 w3",)), Prompt("b", ("w9",)), Prompt("long", (" ".join(WORDS),))]
    work = conversations(tokenizer, talker, max_prompt_tokens=20)
    (batch,) = work.batches(prompts, batch_size=2)
    assert [prompt.id for prompt in batch] == ["a", "b"] and work.left_out == 1
    rows = work.answer(batch)
    sequences = to_sequences(Dataset.from_list(rows), max_length=400)
    for row, sequence in zip(rows, sequences, strict=True):
        alone = greedy(talker, torch.tensor([row["prompt_ids"]]), max_new_tokens=15)[0].tolist()
        assert sequence["input_ids"] == alone
        masked = [t for t, m in zip(sequence["input_ids"], sequence["loss_mask"], strict=True) if m]
        assert masked == row["response_ids"] == alone[len(row["prompt_ids"]) :]
        assert row["finish_reason"] == ("stop" if alone[-1] == 2 else "length")


class Parrot:
    """An engine whose answers are told to it, and that remembers what it was asked."""

    def __init__(self, answers):
        self.answers, self.asked = answers, []

    def answer(self, prompts, seeds):
        from dflare.training.engines import Answer

        self.asked.append([list(prompt) for prompt in prompts])
        return [Answer(*self.answers.pop(0)) for _ in prompts]


def test_later_turns_see_the_generated_earlier_ones(tokenizer):
    prompts = [Prompt("a", ("w1", "w2", "w3"), "w9"), Prompt("b", ("w4",)), Prompt("c", ("w5", "w6"))]
    w = {word: i + 4 for i, word in enumerate(WORDS)}
    engine = Parrot([([w["w10"], 2], "stop"), ([w["w11"], 2], "stop"), ([w["w12"]], "length"),
                     ([w["w13"], 2], "stop"), ([w["w14"], 2], "stop")])  # fmt: skip
    rows = Conversations(tokenizer, lambda: engine, 0.0, 60).answer(prompts)
    assert [row["id"] for row in rows] == ["a", "b", "c", "a (turn 2)", "a (turn 3)"]
    texts = [[w for w in tokenizer.convert_ids_to_tokens(row["prompt_ids"]) if w in WORDS] for row in rows]
    assert texts[3:] == [["w9", "w1", "w10", "w2"], ["w9", "w1", "w10", "w2", "w13", "w3"]]
    assert [row["finish_reason"] for row in rows] == ["stop", "stop", "length", "stop", "stop"]
    assert conversation_of(turn_id("a#2", 1)) == "a#2" and conversation_of("a#2") == "a#2"


def test_templates_that_hide_earlier_thinking_give_rows_as_the_target_saw_them():
    template = (
        "{% for m in messages %}<{{ m['role'] }}> {{ m['content'].split('w59')[-1] }} {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% if enable_thinking %} w58{% endif %}{% endif %}"
    )
    tokenizer = word_tokenizer(template)
    think = [tokenizer.convert_tokens_to_ids(word) for word in ("w20", "w59", "w21")] + [2]
    for thinking in (False, True):
        engine = Parrot([(think, "stop"), ([5, 2], "stop")])
        work = Conversations(tokenizer, lambda engine=engine: engine, 0.0, 60, template={"enable_thinking": thinking})
        first, second = work.answer([Prompt("a", ("w1", "w2"))])
        assert first["response_ids"] == think
        shown = tokenizer.convert_ids_to_tokens(second["prompt_ids"])
        assert "w21" in shown and "w20" not in shown and ("w58" in shown) == thinking


def test_a_template_that_refuses_system_prompts_is_given_them_with_the_first_turn():
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<{{ m['role'] }}> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = word_tokenizer(template)
    engine = Parrot([([5, 2], "stop"), ([5, 2], "stop")])
    rows = Conversations(tokenizer, lambda: engine, 0.0, 60).answer([Prompt("a", ("w1",), "w9"), Prompt("b", ("w2",))])
    texts = [[w for w in tokenizer.convert_ids_to_tokens(row["prompt_ids"]) if w in WORDS] for row in rows]
    assert texts == [["w9", "w1"], ["w2"]]


def test_a_conversation_ends_before_a_turn_that_is_too_long(tokenizer):
    engine = Parrot([([5, 2], "stop")])
    rows = Conversations(tokenizer, lambda: engine, 0.0, 12).answer([Prompt("a", ("w1", " ".join(WORDS[:20])))])
    assert [row["id"] for row in rows] == ["a"]


def test_sampled_answers_depend_on_seed_and_prompts_alone(talker, tokenizer):
    prompts = [Prompt(str(i), (" ".join(WORDS[i : i + 3]),)) for i in range(4)]

    def sample(seed):
        return conversations(tokenizer, talker, temperature=1.0, seed=seed).answer(prompts)

    assert sample(0) == sample(0) != sample(1)


# ------------------------------------------------------------------------------------------------- servers


class Server(ThreadingHTTPServer):
    """Answers as vLLM's completions interface does, with a tiny target; fails as often as it is told."""

    request_queue_size = 64

    def __init__(self, target, failures=0, with_ids=True):
        self.engine, self.failures, self.with_ids = TransformersEngine(target, Decoding(12)), failures, with_ids
        self.lock, self.requests, self.at_once, self.most = threading.Lock(), [], 0, 0
        super().__init__(("127.0.0.1", 0), Handler)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args):
        self.shutdown()  # or its thread would go round and round
        super().__exit__(*args)

    def handle_error(self, request, client_address):
        """Clients that hang up are expected here."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._send({"object": "list", "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": "x"}]})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.at_once += 1
            self.server.most = max(self.server.most, self.server.at_once)
            fails = self.server.failures > 0
            self.server.failures -= fails
            if not fails:
                self.server.requests.append(request)
        time.sleep(0.02)
        with self.server.lock:
            self.server.at_once -= 1
            if fails:
                return (
                    self._send({"error": {"message": "busy"}}, 503) if request["seed"] % 2 else self.connection.close()
                )
            (answer,) = self.server.engine.answer([request["prompt"]], [request["seed"]])
        choice = {"index": 0, "text": "?", "finish_reason": answer.finish_reason, "logprobs": None}
        if self.server.with_ids and request["return_token_ids"]:
            choice["token_ids"] = answer.token_ids
        self._send({"id": "x", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice]})

    def _send(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_a_server_answers_as_the_target_here_does_whatever_fails(talker, tokenizer):
    prompts = [[5 + i, 6, 7 + i] for i in range(12)]
    expected = TransformersEngine(talker, Decoding(12)).answer(prompts, [0] * 12)
    with Server(talker, failures=5) as server:
        engine = ServerEngine(server.url, Decoding(12, top_k=3), concurrency=4)
        assert engine.answer(prompts, list(range(12))) == expected
        assert 2 <= server.most <= 4 and len(server.requests) == 12
        assert {request["seed"] for request in server.requests} == set(range(12))
        assert all(r["max_tokens"] == 12 and r["temperature"] == 0 and r["top_k"] == 3 for r in server.requests)
        with pytest.raises(ValueError, match=r"server_model is 'other', but .* serves \['tiny'\]"):
            ServerEngine(server.url, Decoding(12), model="other")


def test_servers_that_cannot_serve_end_in_one_line(talker, files, capsys):
    words = ["data", "--target", str(files / "target"), "--prompts", str(files / "prompts.jsonl"), "--output",
             str(files / "x.parquet"), "--max_new_tokens", "12", "--retries", "0"]  # fmt: skip
    with Server(talker, with_ids=False) as server:
        assert main([*words, "--server", server.url]) == 2
        assert "returns no token_ids" in capsys.readouterr().err
    with Server(talker, failures=1) as server:
        assert main([*words, "--server", server.url]) == 2
        assert capsys.readouterr().err.startswith("dflare data: error: ")
        assert main([*words[:-2], "--server", server.url]) == 0  # the same command goes on
    assert len(read_rows(files / "x.parquet")) == 40


# ------------------------------------------------------------------------------------------------- runs


def command(files, *more):
    return ["data", "--target", str(files / "target"), "--prompts", str(files / "prompts.jsonl"), "--output",
            str(files / "out.parquet"), "--dtype", "float32", *more]  # fmt: skip


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_killed_data_run_goes_on_without_lost_or_repeated_rows(files, temperature):
    words = command(files, "--batch_size", "3", "--max_new_tokens", "20", "--temperature", temperature)
    run = subprocess.Popen([sys.executable, "-m", "dflare.commands.main", *words])
    parts = files / "out.parquet.parts"
    deadline = time.time() + 120
    while len(list(parts.glob("*.parquet")) if parts.exists() else []) < 3 and time.time() < deadline:
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait()
    done = ResponseStore(files / "out.parquet").ids()
    assert 9 <= len(done) <= 40
    assert main(words) == 0
    rows = read_rows(files / "out.parquet")
    assert sorted(row["id"] for row in rows) == sorted(f"prompts/p{i}" for i in range(40)) and not parts.exists()
    whole = [str(files / "whole.parquet") if word.endswith("out.parquet") else word for word in words]
    assert main(whole) == 0 and read_rows(files / "whole.parquet") == rows


def test_stored_responses_are_kept_and_never_mixed(files, capsys):
    words = command(files, "--max_new_tokens", "4", "--batch_size", "8")
    assert main([*words, "--limit", "10"]) == 0
    first = {row["id"] for row in read_rows(files / "out.parquet")}
    assert main([*words, "--limit", "10"]) == 0  # the same draw: nothing is added
    assert {row["id"] for row in read_rows(files / "out.parquet")} == first and len(first) == 10
    few = jsonl(files / "few.jsonl", [{"id": "x", "turns": ["w1 w2"]}])
    assert main([*words[:4], few, *words[5:]]) == 0  # other prompts: what is stored stays
    assert {row["id"] for row in read_rows(files / "out.parquet")} == first | {"few/x"}
    assert main([*words, "--temperature", "1.0"]) == 2
    assert "temperature is 1.0, but" in capsys.readouterr().err


def test_a_recipe_with_sources_shards_and_benchmarks(files, capsys):
    jsonl(files / "source.jsonl", [{"text": f"w{i} w{i + 1}"} for i in range(30)])
    jsonl(files / "bench.jsonl", [{"id": "a", "turns": ["W3 w4!"]}])
    (files / "recipe.yaml").write_text(
        f"data:\n  target: {files}/target\n  output: {files}/all.parquet\n  dtype: float32\n  max_new_tokens: 4\n"
        f"  benchmarks: [{files}/bench.jsonl]\n  removed: {files}/removed.jsonl\n"
        f"  sources:\n  - {{path: {files}/source.jsonl, columns: [text], name: mine, format: 'w9 {{}} w8'}}\n"
    )
    names = set()
    for shard in ("1/2", "2/2"):
        assert main(["data", "--config", str(files / "recipe.yaml"), "--shard", shard]) == 0
        rows = read_rows(shard_file(f"{files}/all.parquet", shard))
        names |= {row["id"] for row in rows}
        assert all([row["prompt_ids"][1], row["prompt_ids"][-2]] == [13, 12] for row in rows)  # w9 and w8
    mine = "mine@" + f"{zlib.crc32(b'w9 {} w8'):08x}"
    assert names == {f"{mine}/{i}" for i in range(30) if i != 3}
    assert len(load_responses(files / "all-*.parquet")) == 29
    assert "bench: 1 identical" in capsys.readouterr().out
    lists = [files / f"removed-0000{shard}-of-00002.jsonl" for shard in (1, 2)]
    removed = [json.loads(line) for file in lists for line in file.read_text().splitlines()]
    assert removed == [{"id": f"{mine}/3", "reason": "identical", "benchmarks": ["bench"]}]


def test_a_format_is_filled_at_its_first_braces_alone():
    assert Prompt("a", ("1 + {} = 3",), format="{} In \\boxed{}.").opening == "1 + {} = 3 In \\boxed{}."


def test_responses_without_a_token_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no file"):
        load_responses(tmp_path / "none.parquet")
    store = ResponseStore(tmp_path / "empty.parquet")
    store.add([dict(zip(SCHEMA.names, ("a", [1], [], 0.0, "stop"), strict=True))])
    store.finish()
    with pytest.raises(ValueError, match="no response token"):
        load_responses(tmp_path / "empty.parquet")


def test_sequences_are_cut_and_empty_ones_dropped():
    rows = [("a", [5] * 6, [7] * 6, 0.0, "stop"), ("b", [5] * 9, [7] * 5, 0.8, "stop"), ("c", [5], [7], 0.0, "stop")]
    sequences = to_sequences(
        Dataset.from_list([dict(zip(SCHEMA.names, row, strict=True)) for row in rows]), max_length=10
    )
    assert [(s["length"], sum(s["loss_mask"]), s["greedy"]) for s in sequences] == [(10, 4, True)]
