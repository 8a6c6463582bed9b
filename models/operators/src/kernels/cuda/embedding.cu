// Rows of a table by token id: a block for each row.

KERNEL(256) embedding(const void* ids, const void* table, void* y, EmbeddingParams p) {
    begin();
    u32 row = blockIdx.x;
    i32 id = ((const i32*)ids)[row];
    u64 to = (u64)row * p.ldy;
    if (id < 0 || (u32)id >= p.vocabulary) return poison(p.y, y, to, p.k);
    u64 from = (u64)id * p.k;
    bool wide = by_four(p.table, table, p.k) && by_four(p.y, y, p.ldy);
    along(p.k, wide, [&](u32 i, auto step) {
        float v[step.n];
        load(p.table, table, from + i, v);
        store(p.y, y, to + i, v);
    });
}
