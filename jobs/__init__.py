"""Jobs of a cluster, for `ray job submit`: each is a command of `scalingnote`, started from a checkout."""
