-- Adds a slice of a snapshot to its shadow set.
-- KEYS: lease, shadow   ARGV: generation, TTL in s, hashes (packed, 8 bytes each)
-- Returns 'ok' or 'fenced'.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 'fenced'
end
local packed = ARGV[3]
for first = 1, #packed, 8000 do
  local members = {}
  for at = first, math.min(first + 7999, #packed), 8 do
    members[#members + 1] = string.sub(packed, at, at + 7)
  end
  redis.call('SADD', KEYS[2], unpack(members))
end
redis.call('EXPIRE', KEYS[2], ARGV[2])
return 'ok'
