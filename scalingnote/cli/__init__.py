"""The command line: parser, commands, terminal output, jobs on a cluster, checks of a machine."""
