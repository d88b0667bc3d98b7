"""An index that is written while it is searched: log, state, compaction, versions."""
