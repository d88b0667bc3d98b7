"""Settings of pseudo-queries: number, kinds, and real queries to add."""

from typing import Literal

from pydantic import Field, field_validator

from scalingnote.core.config import Config

TextKind = Literal[
    "title",
    "first_sentence",
    "sentence",
    "window",
    "title_window",
    "phrase",
    "keywords",
    "question",
]

# Shares of the kinds, from an ablation on three collections (docs/guides/distil.md): without questions, or
# without keywords, a lookup table keeps about a point less of its teacher's nDCG@10.
DEFAULT_MIX: dict[TextKind, float] = {
    "title": 0.05,
    "sentence": 0.15,
    "window": 0.25,
    "title_window": 0.06,
    "phrase": 0.09,
    "keywords": 0.1,
    "question": 0.3,
}


class PseudoQueriesConfig(Config):
    """Training texts of a student, drawn from the documents that it will search; needs no query log."""

    count: int | None = Field(
        40_000,
        ge=1,
        description="texts drawn over all documents, before equal ones are merged; null: one text of each "
        "kind in `mix` from every document",
    )
    mix: dict[TextKind, float] = Field(
        DEFAULT_MIX,
        min_length=1,
        description="kinds and their shares. title; first_sentence, sentence: of the content, cut at "
        "32 words; window: consecutive words of title or content; title_window: part of the title and a "
        "window; phrase: words between function words; keywords: some content words in their order; "
        "question: phrases in a question template (English, Chinese). Without spaces, two characters count "
        "as a word",
    )
    train_queries: int | None = Field(
        0, ge=0, description="real queries of the dataset's training split to add; null adds all of them"
    )
    query_log: str | None = Field(
        None,
        description="file with real queries to add: text lines, JSON lines or Parquet (column `query`, "
        "else `text`)",
    )
    validation_share: float = Field(
        0.02, ge=0, lt=1, description="share of the documents whose texts are kept for validation"
    )
    rows_per_part: int = Field(8192, ge=1, description="rows of one part of the artifact")
    seed: int = Field(0, ge=0, description="of every draw")

    @field_validator("mix")
    @classmethod
    def _has_positive_shares(cls, mix: dict[TextKind, float]) -> dict[TextKind, float]:
        if wrong := [kind for kind, share in mix.items() if share <= 0]:
            raise ValueError(f"shares must be above 0: remove {', '.join(wrong)}")
        return mix
