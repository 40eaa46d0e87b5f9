"""Requests, slots, the scheduler, draft length: what keeps a session busy."""
