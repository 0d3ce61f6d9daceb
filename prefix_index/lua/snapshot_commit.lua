-- Replaces a pod's sets with its complete shadow sets. Batches with numbers up to the snapshot's become duplicates.
-- KEYS: lease, seq, then shadow and set of each tier, slots
-- ARGV: generation, snapshot's number, TTL in s, size of each tier
-- Returns 'ok', 'gap' (a shadow set is incomplete, or older than the set) or 'fenced'.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 'fenced'
end
local complete = tonumber(redis.call('GET', KEYS[2]) or -1) < tonumber(ARGV[2])
for tier = 1, 3 do
  complete = complete and redis.call('SCARD', KEYS[2 * tier + 1]) == tonumber(ARGV[3 + tier])
end
if not complete then
  redis.call('UNLINK', KEYS[3], KEYS[5], KEYS[7])
  return 'gap'
end
for tier = 1, 3 do
  local shadow, set = KEYS[2 * tier + 1], KEYS[2 * tier + 2]
  redis.call('UNLINK', set)
  if tonumber(ARGV[3 + tier]) > 0 then
    redis.call('RENAME', shadow, set)
    redis.call('EXPIRE', set, ARGV[3])
  end
end
for tier, flag in ipairs({'hosts', 'disks'}) do -- look-ups read these tiers from now on
  if tonumber(ARGV[4 + tier]) > 0 then
    redis.call('HSET', KEYS[9], flag, 1)
  end
end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
return 'ok'
