// Rows of a table by token id: a threadgroup for each row.

[[max_total_threads_per_threadgroup(256)]]
kernel void embedding(device const u8* ids [[buffer(0)]], device const u8* table [[buffer(1)]],
                      device u8* y [[buffer(2)]], constant EmbeddingParams& p [[buffer(3)]],
                      uint3 group [[threadgroup_position_in_grid]], uint3 threads [[threads_per_threadgroup]],
                      uint index [[thread_index_in_threadgroup]]) {
    const Place at = {index, threads.x, 0, 0};
    const i32 id = ((device const i32*)ids)[group.x];
    const u64 to = u64(group.x) * p.ldy;
    if (id < 0 || u32(id) >= p.vocabulary) return poison(p.y, y, to, p.k, at);
    const u64 from = u64(id) * p.k;
    const bool wide = by_four(p.table, table, p.k) && by_four(p.y, y, p.ldy);
    for (u32 i = 4 * at.index; i < p.k; i += 4 * at.count) {
        store4(p.y, y, to + i, p.k - i, wide, load4(p.table, table, from + i, p.k - i, wide));
    }
}
