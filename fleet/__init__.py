"""The fleet of pods: roles of running pods, and the planner that sets their number and roles."""
