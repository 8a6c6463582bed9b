//! Graphs: operators, recording, planning, launching, updating.
//!
//! Recording notes a flat list of operations with what they read and write; nothing runs. Stopping packs the temporaries by
//! liveness into the graph's arena, derives the dependencies from the accesses, and hands the plan to the backend. Launching waits for
//! the outside buffers' last uses, submits one operation, and marks them.

mod encoder;
mod exec;
mod operator;
pub(crate) mod recorder;

pub use encoder::Encoder;
pub use exec::{Graph, NodeId, Update, Updated};
pub use operator::GraphOperator;
