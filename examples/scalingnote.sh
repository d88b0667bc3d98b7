#!/usr/bin/env bash
# The ScalingNote paper from logs to /search, one stage after the other, to be read from top to bottom.
#
#   examples/scalingnote.sh                                    in minutes on two cores, without a download
#   CONFIG=my.yaml RUN=runs/mine examples/scalingnote.sh       on data of your own: docs/guides/train.md
#
# Every line builds an artifact in $RUN. A line that is finished is skipped, one that was killed goes on, and
# `scalingnote run $CONFIG` does all of them at once.
set -euo pipefail
CONFIG=${CONFIG:-configs/quickstart/python_docs.yaml}
RUN=${RUN:-runs/scalingnote}
SET="--set run_dir=$RUN ${SET:-}"

# The data: documents, queries, judgements and a log of impressions, checked row by row. Here the log is
# simulated from the judgements; with `dataset: {name: logs}` it is your platform's.
scalingnote run $CONFIG $SET --only prepare

# Which words of a query matter: related queries share them, and lend clicks to one another.
scalingnote run $CONFIG $SET --only planner

# Triplets of a query, a document that answers it and documents that do not, from clicks and rankings (Algorithm 1).
scalingnote run $CONFIG $SET --only collect

# Stage I: both towers start from the same LLM and learn to find each other's texts (ScalingDual).
scalingnote run $CONFIG $SET --only train

# The trained query tower embeds the training queries once. The LLM is not needed for queries after this line.
scalingnote run $CONFIG $SET --only teacher

# Stage II: a small tower learns to give the same embeddings for the same queries (QKD, Eq. 15).
scalingnote run $CONFIG $SET --only distill

# The LLM embeds every document, once.
scalingnote run $CONFIG $SET --only encode

# Documents get semantic IDs, and their embeddings an index that is tuned for the small tower's queries.
scalingnote run $CONFIG $SET --from quantize --until index

# What the small tower keeps of the LLM, what the index costs, and where BM25 is better: $RUN/report.html.
scalingnote run $CONFIG $SET --only evaluate

# A first search, then the service: page, POST /search and metrics at http://localhost:8000, until CTRL-C.
scalingnote search "parse a date from a string" --run "$RUN"
if [ "${SERVE:-1}" != 0 ]; then scalingnote serve --run "$RUN"; fi
