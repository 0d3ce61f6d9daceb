"""The prefix index in Redis: pods publish the block hashes they hold, gateways look prompts up."""
