import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from scalingnote.core.errors import ConfigError
from scalingnote.models.backbone import train_tokenizer
from scalingnote.triplets.collect import transformer_models
from scalingnote.triplets.collect.transformer_models import GENERATED, QueryGenerator
from scalingnote.triplets.config import QueryGenerationConfig

TEXTS = ["what is asthma", "what causes anemia in children", "高血压怎么办", "asthma", "treatment for anemia"]
QUERIES = pa.table({"query_id": [f"q{i}" for i in range(len(TEXTS))], "query": TEXTS})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Save BART's architecture with random weights, large enough that its output depends on its input."""
    folder = tmp_path_factory.mktemp("bart")
    tokens = save_tokenizer(folder, mask_token="[MASK]", bos_token="[CLS]")
    config = BartConfig(
        vocab_size=tokens,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=24,
        init_std=1.0,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=3,
        forced_eos_token_id=3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BartForConditionalGeneration(config)
    # Settings of bart-base, which must not change the effect of our settings.
    model.generation_config.update(num_beams=4, early_stopping=True, no_repeat_ngram_size=3, max_length=20)
    model.save_pretrained(folder)
    return str(folder)


def save_tokenizer(folder, **special) -> int:
    tokenizer = Tokenizer.from_str(train_tokenizer(TEXTS * 5, vocabulary=320))
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[SEP]", **special
    )
    wrapped.save_pretrained(folder)
    return len(wrapped)


def generator(checkpoint, **knobs) -> QueryGenerator:
    return QueryGenerator(QueryGenerationConfig(path=checkpoint, **knobs), device="cpu")


def test_generation_without_noise_and_masks_is_plain(checkpoint):
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    plain = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt")
        model.generation_config.max_length = None
        ids = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            num_beams=1,
            do_sample=False,
            max_new_tokens=23,
        )
        plain.append(" ".join(tokenizer.decode(ids[0], skip_special_tokens=True).split()))
    assert len(set(plain)) > 1  # otherwise the output does not depend on the encoder

    generated, counts = generator(checkpoint, sigmas=(0.0,), mask_fraction=0.0)(QUERIES)
    assert generated.schema == GENERATED
    assert generated["query"].to_pylist() == plain
    assert generated["query_id"].to_pylist() == ["q0~0", "q1~0", "q2~0", "q3~0", "q4~0"]
    assert counts == {"generated": 5, "dropped_same": 0, "dropped_empty": 0}


def test_noise_and_masks_depend_only_on_query_and_sigma(checkpoint, monkeypatch):
    knobs = {"sigmas": (1.0, 2.0), "mask_fraction": 0.3}
    generated = generator(checkpoint, **knobs)(QUERIES)[0].to_pylist()
    monkeypatch.setattr(transformer_models, "GENERATED_BATCH_QUERIES", 1)
    assert generator(checkpoint, **knobs)(QUERIES)[0].to_pylist() == generated

    def by_id(rows):
        return sorted(rows, key=lambda row: row["query_id"])

    backwards = QUERIES.take(pa.array(range(len(TEXTS)))[::-1])
    assert by_id(generator(checkpoint, **knobs)(backwards)[0].to_pylist()) == by_id(generated)
    halves = [generator(checkpoint, **knobs)(part)[0] for part in (QUERIES.slice(0, 2), QUERIES.slice(2))]
    assert pa.concat_tables(halves).to_pylist() == generated
    assert generator(checkpoint, **knobs, seed=1)(QUERIES)[0].to_pylist() != generated
    # Another list of sigmas does not change the queries of one of them.
    single = generator(checkpoint, sigmas=(2.0,), mask_fraction=0.3)(QUERIES)[0]
    query_of = {row["source_query_id"]: row["query"] for row in single.to_pylist()}
    assert all(query_of[row["source_query_id"]] == row["query"] for row in generated if row["sigma"] == 2.0)


def test_the_share_of_masked_tokens_is_as_configured(checkpoint):
    model = generator(checkpoint, sigmas=(0.0,), mask_fraction=0.3)
    long = pa.table(
        {"query_id": [str(i) for i in range(200)], "query": ["what causes anemia in children"] * 200}
    )
    ids = np.array([draft.ids for draft in model._drafts(long)])
    masked = ids == model._tokenizer.mask_token_id
    assert not masked[:, [0, -1]].any()  # [CLS] and [SEP] stay
    inner = masked[:, 1:-1]
    assert abs(inner.mean() - 0.3) < 5 * (0.3 * 0.7 / inner.size) ** 0.5
    assert len({tuple(row) for row in inner.tolist()}) > 5


def test_empty_and_repeated_texts_are_dropped(checkpoint, monkeypatch):
    texts = ["What is  ASTHMA?", "new", "?!", "New!", "other", "newer"]

    def generate(self, drafts):
        return [texts[2 * draft.source + draft.number] for draft in drafts]

    monkeypatch.setattr(QueryGenerator, "_generate", generate)
    generated, counts = generator(checkpoint)(QUERIES.slice(0, 3))
    assert generated.to_pylist() == [
        {"query_id": "q0~1", "query": "new", "source_query_id": "q0", "sigma": 0.2},
        {
            "query_id": "q1~1",
            "query": "New!",
            "source_query_id": "q1",
            "sigma": 0.2,
        },  # equal to a text of another source
        {"query_id": "q2~0", "query": "other", "source_query_id": "q2", "sigma": 0.1},
        {"query_id": "q2~1", "query": "newer", "source_query_id": "q2", "sigma": 0.2},
    ]
    assert counts == {"generated": 6, "dropped_same": 1, "dropped_empty": 1}

    texts[3] = "NEW"
    texts[2] = "new"  # twice from one source
    generated, counts = generator(checkpoint)(QUERIES.slice(0, 2))
    assert generated["query_id"].to_pylist() == ["q0~1", "q1~0"]
    assert counts == {"generated": 4, "dropped_same": 2, "dropped_empty": 0}


def test_empty_and_overlong_queries_are_read(checkpoint):
    odd = pa.table({"query_id": ["a", "b", "c"], "query": pa.array(["", None, "asthma " * 99], pa.string())})
    assert generator(checkpoint)(odd)[1]["generated"] == 6  # the model reads 24 tokens
    generated, counts = generator(checkpoint)(QUERIES.slice(0, 0))
    assert (generated.schema, len(generated), counts["generated"]) == (GENERATED, 0, 0)


# --- checkpoints ---------------------------------------------------------------------------------------


def save_t5(folder, **special) -> str:
    tokens = save_tokenizer(folder, **special)
    config = T5Config(
        vocab_size=tokens,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=3,
        decoder_start_token_id=0,
    )
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


def test_t5_masks_with_its_sentinels_in_order(tmp_path):
    sentinels = [f"<extra_id_{i}>" for i in range(3)]
    model = generator(
        save_t5(tmp_path, additional_special_tokens=sentinels), mask_fraction=0.9, sigmas=(0.5,)
    )
    assert model(QUERIES)[1]["generated"] == len(TEXTS)
    numbers = model._tokenizer.convert_tokens_to_ids(sentinels)
    for draft in model._drafts(QUERIES):
        masks = [id for id in draft.ids if id in numbers]
        assert (
            masks == (numbers + numbers[-1:] * len(masks))[: len(masks)]
        )  # the last one is used for all others


def test_checkpoints_that_cannot_generate_are_refused(tmp_path):
    path = save_t5(tmp_path / "t5")
    with pytest.raises(ConfigError, match="mask_fraction=0"):  # it has no mask token
        generator(path)
    assert generator(path, mask_fraction=0.0)(QUERIES)[1]["generated"] == 10
    with pytest.raises(ConfigError, match="cannot load an encoder-decoder model from 'no/such-model'"):
        generator("no/such-model")
    tokens = save_tokenizer(tmp_path)
    config = BertConfig(
        vocab_size=tokens, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot load an encoder-decoder model"):
        generator(str(tmp_path))
