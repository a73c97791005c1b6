"""The draft model and early exit: texts are the same, their caches stay sound, and impossible choices are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from by_hand import stepped_by_hand
from drafters import serve

from motley import LLM
from motley.bundled import bundled_draft_path
from motley.engine import SamplingParams
from motley.engine.drafting import Speculator
from motley.engine.drafting.control import FixedControl
from motley.engine.drafting.draft_model import DraftModel
from motley.errors import ConfigError, DeviceError, MotleyError, RequestError
from random_models import LLAMA, N_VOCAB

CREWS: dict[str, dict[str, Any]] = {
    "cpu": {"devices": "cpu"},
    "tensor": {"devices": "cpu,cpu", "split_mode": "tensor", "tensor_split": (3, 1)},
    "layer": {"devices": "cpu,cpu", "split_mode": "layer"},
}
OPTIONS: dict[str, Any] = {"n_ctx": 128, "n_batch": 32, "n_parallel": 3, "kv_block_size": 8}


@contextmanager
def load(path: Path, **options: Any) -> Iterator[LLM]:
    """A model whose drafts are all computed, with an engine that takes its steps only when the test calls `step`."""
    with LLM(path, **(OPTIONS | options)) as llm, stepped_by_hand(llm):
        engine = llm._loaded.engine
        engine.speculator._control = FixedControl()
        yield llm


def prompts_of(llm: LLM) -> list[list[int]]:
    texts = ("Once upon a time there was a dog.", "The red kite", "Tom went to the shop. " * 6)
    return [llm.tokenizer.encode(text) for text in texts]


def params_of(spec: str, **options: Any) -> list[SamplingParams]:
    shared: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "speculative": spec} | options
    return [
        SamplingParams(temperature=0, **shared),
        SamplingParams(seed=2, **shared),
        SamplingParams(seed=3, repeat_penalty=1.2, **shared),
    ]


@pytest.mark.parametrize("crew", CREWS)
@pytest.mark.parametrize("spec", ["draft", "exit", "lookup,draft", "exit,lookup"])
def test_texts_are_the_same_with_models_that_draft(bundled: Path, crew: str, spec: str) -> None:
    if crew != "cpu" and "," in spec:
        pytest.skip("one crew is enough for several drafters")
    with load(bundled, draft_model=bundled_draft_path(), draft_max=5, **CREWS[crew]) as llm:
        engine = llm._loaded.engine
        without = serve(engine, prompts_of(llm), params_of("off"))
        found = serve(engine, prompts_of(llm), params_of(spec))
        assert [r.generated for r in found] == [r.generated for r in without]
        counts = [count for request in found for count in request.drafts.values()]
        assert sum(count.accepted for count in counts) > 10
        assert sum(r.n_steps for r in found) < sum(r.n_steps for r in without)
        (draft,) = llm._loaded.companions
        draft._cache.check_integrity()


@pytest.mark.parametrize("spec", ["draft", "exit"])
def test_texts_are_the_same_when_contexts_shift_and_caches_are_full(spec: str) -> None:
    options = {"n_ctx": 48, "draft_layers": 2, "kv_cache_tokens": 96, "draft_max": 7}
    path = bundled_draft_path()  # it drafts for itself, and its drafts are right
    with load(path, draft_model=path, **options) as llm:
        engine = llm._loaded.engine
        prompts = prompts_of(llm)[:2] * 2
        answers = []
        for each in ("off", spec):
            params = params_of(each, context_shift=True, n_keep=2) + params_of(each)[:1]
            params[0] = SamplingParams(
                temperature=0,
                max_tokens=90,
                ignore_eos=True,
                speculative=each,
                context_shift=True,
                n_keep=2,
            )
            answers.append([r.generated for r in serve(engine, prompts, params)])
        assert answers[0] == answers[1]


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    path = bundled_draft_path()
    with load(path, draft_model=path, draft_max=7) as llm:
        for request in serve(llm._loaded.engine, prompts_of(llm)[:2], params_of("draft")[:2]):
            count = request.drafts["draft"]
            assert count.accepted == count.drafted > 15
            assert request.n_steps <= 5


def test_a_draft_model_that_fails_is_left_out(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(bundled, draft_model=bundled_draft_path()) as llm:
        engine = llm._loaded.engine
        without = [r.generated for r in serve(engine, prompts_of(llm), params_of("off"))]

        def failing(*_: Any) -> Any:
            raise MemoryError

        monkeypatch.setattr(DraftModel, "_run", failing)
        requests = serve(engine, prompts_of(llm), params_of("draft"))
        assert [r.generated for r in requests] == without


def test_an_exit_that_fails_is_a_failed_step(bundled: Path) -> None:
    with load(bundled) as llm:
        engine = llm._loaded.engine
        without = [r.generated for r in serve(engine, prompts_of(llm), params_of("off"))]
        run, calls = engine.runner.run, []

        def failing(batch: Any, tokens: Any, copies: Any) -> Any:
            calls.append(batch.shape.n_layers)
            if calls.count(4) == 3 and calls[-1] == 4:
                raise RuntimeError("gone")
            return run(batch, tokens, copies)

        engine.runner.run = failing  # type: ignore[method-assign]
        requests = [engine.add(p, s) for p, s in zip(prompts_of(llm), params_of("exit"), strict=True)]
        while engine.has_work:
            engine.step()
            engine.cache.check_integrity()
        assert [r.generated for r in requests] == without
        assert all(r.n_retries == 1 for r in requests)
        assert calls.count(4) == 3  # it is not asked again


def test_drafters_that_a_model_does_not_have_are_refused(bundled: Path) -> None:
    with LLM(bundled, **OPTIONS) as llm:
        for spec, why in (
            ("draft", "there is no draft model"),
            ("mtp", "the model has no multi-token prediction layer"),
            ("telepathy", "there is no drafter 'telepathy'"),
            ("off,lookup", "off stands alone"),
            ("", "there is no drafter"),
        ):
            with pytest.raises(RequestError, match=re.escape(why)):
                llm.generate("a", max_tokens=1, speculative=spec)
        for value in (0, 64, "3", 1.5):
            with pytest.raises(RequestError, match="draft_max"):
                llm.generate("a", max_tokens=1, draft_max=value)
        with pytest.raises(RequestError, match="speculative"):
            llm.generate("a", max_tokens=1, speculative=3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"draft_max": 0}, "draft_max is 0"),
        ({"draft_max": 64}, "draft_max is 64"),
        ({"draft_min": 9, "draft_max": 3}, "at least 9 and at most 3"),
        ({"spec": "draft"}, "there is no draft model"),
        ({"draft_model": 3}, "draft_model is 3"),
        ({"draft_model": ""}, "draft_model is ''"),
        ({"draft_layers": 8}, "the model has 8 layers"),
        ({"spec": ""}, "there is no drafter ''"),
        ({"spec": "auto, off"}, "auto stands alone"),
        ({"draft_min": True}, "draft_min is True"),
        ({"lookup_answers": -1}, "lookup_answers is -1"),
        ({"lookup_answers": 1 << 20}, "lookup_answers is 1048576"),
        ({"lookup_answers": "many"}, "lookup_answers is 'many'"),
    ],
)
def test_options_that_cannot_be_are_refused(bundled: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(MotleyError, match=re.escape(why)):
        LLM(bundled, **(OPTIONS | options))


def test_requests_that_would_never_have_drafts_are_refused(bundled: Path) -> None:
    with load(bundled, spec="auto", draft_min=4, draft_layers=3) as llm:
        engine = llm._loaded.engine
        for spec in (None, "lookup"):
            with pytest.raises(
                RequestError, match="draft_max=3 is not possible: drafts have at least 4 tokens"
            ):
                engine.new_request([5], SamplingParams(draft_max=3, speculative=spec))
        off = engine.new_request([5], SamplingParams(draft_max=3, speculative="off"))
        assert off.speculation.drafters == ()
        assert engine.new_request([5], SamplingParams(draft_max=4)).speculation.draft_max == 4
        why = "speculation 'lookup,exit' is not possible with n_layer_exit=3: drafts are computed by the first 3 layers"
        with pytest.raises(RequestError, match=why):
            engine.new_request([5], SamplingParams(speculative="lookup,exit", n_layer_exit=3))
        params = SamplingParams(speculative="exit", n_layer_exit=4)
        assert engine.new_request([5], params).speculation.drafters == ("exit",)


def test_by_default_a_request_with_few_layers_has_no_early_exit(bundled: Path) -> None:
    with load(bundled, spec="lookup,exit", draft_layers=3) as llm:
        engine = llm._loaded.engine
        request = engine.new_request([5], SamplingParams(n_layer_exit=3))
        assert request.speculation.drafters == ("lookup",)


def test_a_draft_model_with_another_vocabulary_is_refused(bundled: Path, tmp_path: Path) -> None:
    other = LLAMA.write(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match="another vocabulary than motley-15m-q8_0"):
        LLM(bundled, draft_model=other, **OPTIONS)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},  # any token may come
        {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.3},
        {"logit_bias": {N_VOCAB - 1: -5.0}},
    ],
)
def test_tokens_that_a_draft_model_lacks_are_not_given_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    path, n_less = LLAMA.write(tmp_path / "model.gguf"), N_VOCAB - 20
    monkeypatch.setattr("random_models.N_VOCAB", n_less)
    with load(path, draft_model=LLAMA.write(tmp_path / "draft.gguf")) as llm:
        engine = llm._loaded.engine
        (draft,) = llm._loaded.companions
        run, given = draft.runner.run, set[int]()

        def recorded(batch: Any, tokens: Any, copies: Any) -> Any:
            given.update(tokens)
            return run(batch, tokens, copies)

        monkeypatch.setattr(draft.runner, "run", recorded)
        prompts = [[5, 6, 7, 8 + i] for i in range(3)]
        answers = []
        for spec in ("off", "draft"):
            shared: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "speculative": spec}
            params = [SamplingParams(seed=i, **shared, **options) for i in range(2)]
            params.append(SamplingParams(seed=2, **shared))  # goes on having drafts
            requests = serve(engine, prompts, params)
            answers.append([request.generated for request in requests])
        assert answers[0] == answers[1]
        assert "logit_bias" in options or max(map(max, answers[0])) >= n_less
        assert max(given) < n_less
        assert requests[2].drafts["draft"].drafted > 0
        assert draft in engine.speculator._drafters
        draft._cache.check_integrity()


def test_too_little_memory_for_both_models_is_refused(bundled: Path) -> None:
    LLM(bundled, device_memory="17MiB", **OPTIONS).close()
    with pytest.raises(DeviceError, match="beside its draft model motley-draft"):
        LLM(bundled, draft_model=bundled_draft_path(), device_memory="17MiB", **OPTIONS)
    with pytest.raises(DeviceError, match="draft model"):
        LLM(bundled, draft_model=bundled_draft_path(), device_memory="1MiB", **OPTIONS)


def test_llama_cpp_names_are_accepted() -> None:
    from motley.engine.drafting import Lookup

    speculator = Speculator([Lookup()], spec="ngram-simple", n_vocab=10)
    assert speculator.default.drafters == ("lookup",)
    assert speculator.choose("none").drafters == ()
    assert speculator.choose("ngram-mod,ngram-map-k4v").drafters == ("lookup",)


def test_a_draft_model_promises_no_draft_that_it_cannot_have(bundled: Path) -> None:
    """A GPU would not get its next step in advance."""
    with load(bundled, draft_model=bundled_draft_path()) as llm:
        (draft,) = llm._loaded.companions
        draft._n_ctx, draft._n_vocab = 8, 100
        may_draft = {}
        for n, bias in ((6, {}), (7, {}), (3, {99: 1.0}), (3, {100: 1.0})):
            request = llm._loaded.engine.new_request([5] * n, SamplingParams(logit_bias=bias))
            may_draft[n, *bias] = draft.may_draft(request)
        assert may_draft == {(6,): True, (7,): False, (3, 99): True, (3, 100): False}


def test_a_draft_model_computes_only_what_is_new_in_a_turn_of_a_chat(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(bundled, draft_model=bundled_draft_path()) as llm:
        engine = llm._loaded.engine
        (draft,) = llm._loaded.companions
        run, given = draft.runner.run, list[int]()

        def recorded(batch: Any, tokens: Any, copies: Any) -> Any:
            given.extend(tokens)
            return run(batch, tokens, copies)

        monkeypatch.setattr(draft.runner, "run", recorded)
        prompt = list(range(100, 150))
        n_given: dict[str | None, int] = {}
        for salt in (None, "another user"):
            text = prompt
            for n_new in (0, 5):
                text = [*text, *range(300, 300 + n_new)]
                answers = []
                for spec in ("off", "draft"):
                    params = SamplingParams(
                        temperature=0, max_tokens=9, ignore_eos=True, speculative=spec, cache_salt=salt
                    )
                    given.clear()
                    (request,) = serve(engine, [text], [params])
                    draft._cache.check_integrity()
                    answers.append(request.generated)
                assert answers[0] == answers[1]
                n_given.setdefault(salt, len(given))
                text = [*text, *request.generated]
            assert n_given[salt] >= len(prompt)
            assert len(given) < 30  # of 73


def test_a_long_prompt_gets_drafts_beside_a_request_that_has_them(bundled: Path) -> None:
    """The draft model takes it in portions, in steps in which the other request has drafts."""
    with load(bundled, draft_model=bundled_draft_path(), draft_max=3) as llm:
        engine, prompt = llm._loaded.engine, prompts_of(llm)[0]
        shared: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "speculative": "draft"}
        first = engine.add(prompt, SamplingParams(max_tokens=100, **shared))
        while not first.drafts:
            engine.step()
        late = engine.add(list(range(100, 180)), SamplingParams(max_tokens=20, **shared))  # 2.5 batches
        while engine.has_work:
            engine.step()
            if not late.is_finished:
                assert not first.is_finished
        assert late.drafts["draft"].drafted > 6
        (draft,) = llm._loaded.companions
        draft._cache.check_integrity()


def test_a_block_of_rejected_tokens_that_another_sequence_has_found_is_not_overwritten(bundled: Path) -> None:
    with load(bundled, draft_model=bundled_draft_path(), draft_max=7, kv_block_size=4) as llm:
        engine = llm._loaded.engine
        (draft,) = llm._loaded.companions
        assert isinstance(draft, DraftModel)
        prompt, params = prompts_of(llm)[0], params_of("draft", top_k=0, min_p=0.0)[1]
        (alone,) = serve(engine, [prompt], [params])
        request = engine.add(prompt, params)
        n_shared = 0
        while engine.has_work:
            engine.step()
            draft._cache.check_integrity()
            own = draft._sequences.get(request)
            if own is not None and request.tokens[: len(own.tokens)] != own.tokens:
                found = draft._cache.open([*own.tokens, 1])  # as a request that goes on like that would
                n_shared += found.n_cached > own.n_sure
        assert n_shared > 3
        assert request.generated == alone.generated
        assert request.drafts == alone.drafts  # so the draft model has seen the same keys and values
