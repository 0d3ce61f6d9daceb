-- Claims an idempotency key for a request, or returns the claim that it has.
-- KEYS: HASH of the claim
-- ARGV: digest of the request, time of its arrival in s, owner, life of the claim in ms
-- Returns {digest, time} of the first claim. A claim that a second owner repeats has no owner, so that none removes it.
-- Running it twice for one owner changes nothing.
local claim = redis.call('HMGET', KEYS[1], 'digest', 'created', 'owner')
if not claim[1] then
  redis.call('HSET', KEYS[1], 'digest', ARGV[1], 'created', ARGV[2], 'owner', ARGV[3])
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
  return {ARGV[1], ARGV[2]}
end
if claim[1] == ARGV[1] then
  if claim[3] ~= ARGV[3] then
    redis.call('HSET', KEYS[1], 'owner', '')
  end
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
return {claim[1], claim[2]}
