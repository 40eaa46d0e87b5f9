"""Serving requests on a session: requests, slots, the scheduler, draft length."""
