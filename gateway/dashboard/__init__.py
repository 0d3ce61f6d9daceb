"""What the dashboard shows, as JSON. With API keys both paths need one, and requests are those of its tenant (an admin
sees all). Times are seconds; `now` and `created` are since the epoch. What is not known is null, never left out.

GET /dashboard/state
    now, window_s       the last window_s seconds are what rates, latency, cache, errors and links are over
    gateway             id, version, uptime_s, ready, draining, running, waiting, index_mode ("redis"|"local"|"hash")
    models[]            name, aliases, ready, waiting, max_model_len
    pods[]              name, address, model, role, state, generation, heard_s (since its last answer),
                        blocks {free, cached, leased, quarantined, total} | null, block_size, kv_used (leased and
                        quarantined over total), queued_tokens, running, waiting, reserved, prefill_tokens_per_s,
                        generated_tokens_per_s, preemptions (in the window), speculation | null: {proposer,
                        acceptance_length, accepted, proposed, useless}, gpu | null: {utilization, memory_used,
                        memory_total}
                        state: "ready", "starting", "connecting", "draining", "gone", "refused" (reason says why)
    links[]             from, to, transport, bytes (in the window), busy_s, gb_per_s (1e9 bytes a second while any are
                        under way; lately, or the probe's, where none were in the window; null: not known)
    rates               requests_per_s, prompt_tokens_per_s, output_tokens_per_s, rejections_per_s, retries_per_s
    errors              requests, failed (by our fault), ratio
    latency             ttft, itl, e2e, queue, exposed: {count, mean, p50, p90, p99} | null each (exposed: hand-off time
                        that a request waited for)
    cache               hit_rate (of all prompt tokens), hit_tokens, predicted_tokens, prompt_tokens
    speculation | null  acceptance_length, accepted, proposed, useless (names of pods)
    series              t[] (seconds before now, negative), and as long: requests_per_s[], output_tokens_per_s[],
                        ttft_p50[], ttft_p99[], itl_p50[], itl_p99[], hit_rate[], running[], waiting[], kv_used[]

GET /dashboard/requests?limit=50&since=0
    cursor              give it back as `since` to get only what changed after it
    requests[]          newest first, each as below

GET /dashboard/requests/{id}       our id, with or without its prefix, or the client's own
    id, client_request_id, created, endpoint, model, tenant, trace_id, state ("running", "ok", "aborted", or the kind of
    the error), error, age_s, end_s, ttft_s, prompt_tokens, cached_tokens, output_tokens, attempts, prefill_pod,
    decode_pod, transport, bytes, accepted, rejected (drafts)
    spans[]             kind ("gateway"|"queue"|"chunk"|"pushes"|"hand_off"|"decode"), name, start_s, end_s (since
                        arrival), detail, parts[] {name, start_s, end_s}: what a gateway span is made of, and each push
"""
