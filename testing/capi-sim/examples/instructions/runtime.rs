//! The runtime's hot paths: memory, sessions, graphs, copies.

mod idle;
mod program;

use leasehold::kernel::{session_ops, session_sync_ops};
use leasehold::{Graph, KernelBase, KernelSession, Lease, Result, Runtime, View};

struct Bench {
    runtime: Runtime,
    kernel: KernelBase,
    operands: [Lease<leasehold::Buffer>; 3],
    pinned: Lease<leasehold::Buffer>,
    graph: Graph,
}

impl Bench {
    fn new() -> Result<Self> {
        let runtime = idle::runtime()?;
        let kernel = idle::kernel()?;
        let operands = [runtime.alloc(4096)?, runtime.alloc(4096)?, runtime.alloc(4096)?];
        let pinned = runtime.alloc_pinned(4096)?;
        let graph = runtime.record_graph(|r| session(r, &kernel, &operands))?;
        Ok(Self { runtime, kernel, operands, pinned, graph })
    }
}

fn session(
    runtime: &Runtime,
    kernel: &KernelBase,
    [a, b, c]: &[Lease<leasehold::Buffer>; 3],
) -> Result<()> {
    let operands = [a.read(), b.read(), c.write()];
    let session = KernelSession::begin(kernel, runtime.stream())?;
    let session = session_sync_ops::wait(session, &operands)?;
    let session = session_ops::bind(session)?;
    let session = session_ops::params(session, &[0u32; 4])?;
    let session = session_ops::dispatch_1d(session, 8, 64)?;
    session_sync_ops::update_tokens(session).finish().map(drop)
}

/// The paths, by the names of the table.
const PATHS: [program::Path<Bench>; 6] = [
    ("runtime_alloc_drop", |b| b.runtime.alloc(4096).map(drop)),
    ("runtime_alloc_drop_large", |b| b.runtime.alloc(1 << 20).map(drop)),
    ("session_begin_finish", |b| session(&b.runtime, &b.kernel, &b.operands)),
    ("graph_launch", |b| b.graph.launch().map(drop)),
    ("copy_pinned_up", |b| b.runtime.stream().copy_pinned(b.operands[0].view(), b.pinned.view())),
    ("copy_pinned_down", |b| b.runtime.stream().copy_pinned(b.pinned.view(), b.operands[0].view())),
];

fn main() -> Result<()> {
    program::run(Bench::new, &PATHS)
}
