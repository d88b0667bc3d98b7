"""An index that is written and searched at the same time: log, state, compaction, versions."""
