-- Removes the claim of an idempotency key whose request failed, if this owner made it and no other has repeated it.
-- KEYS: HASH of the claim   ARGV: owner
-- Returns 1 if the claim was removed, else 0.
if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then
  return redis.call('UNLINK', KEYS[1])
end
return 0
