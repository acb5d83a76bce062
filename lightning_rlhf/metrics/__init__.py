"""Metrics: what they are called, how they are collected and reduced, and statistics that live across iterations."""
