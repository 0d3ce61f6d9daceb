"""Sender."""
