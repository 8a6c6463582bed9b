//! The pages of the book with Rust in them. `cargo test -p leasehold-book --doc` compiles and runs
//! their examples. `tests/book` checks everything else; pages that show an example's file are
//! compared with the file there.

macro_rules! pages {
    ($($name:ident $path:literal)*) => { $( #[doc = include_str!($path)] pub mod $name {} )* };
}

pages! {
    leases "concepts/leases.md"
    timelines "concepts/timelines.md"
    memory "concepts/memory.md"
    kernels "concepts/kernels.md"
    graphs "concepts/graphs.md"
    backends "concepts/backends.md"
    tensor_type "tutorials/tensor-type.md"
    out_of_memory "how-to/out-of-memory.md"
    suspend_weights "how-to/suspend-weights.md"
    tensor_maps "how-to/tensor-maps.md"
    blocks_together "how-to/blocks-together.md"
    growing_memory "how-to/growing-memory.md"
    graph_budget "how-to/graph-budget.md"
    partitions "how-to/partitions.md"
    loops "how-to/loops.md"
    many_copies "how-to/many-copies.md"
    check_values "how-to/check-values.md"
    share_memory "how-to/share-memory.md"
    find_memory_errors "how-to/find-memory-errors.md"
    operators_and_models "how-to/operators-and-models.md"
    trace_and_report "how-to/trace-and-report.md"
    wait_without_blocking "how-to/wait-without-blocking.md"
    serve_a_model "how-to/serve-a-model.md"
    ranks "how-to/ranks.md"
    test_without_a_gpu "how-to/test-without-a-gpu.md"
    readme "../README.md"
}
