"""Requests, the scheduler, sampling: from prompts to tokens."""
