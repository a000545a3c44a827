"""What a build would do: identities, the plan, the lock, shards."""
