"""The job launcher: starts the ranks of a job, notices crash and hang, restarts in seconds."""
