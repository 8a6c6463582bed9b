//! Graphs: operators, recording, planning, launching, updating.
//!
//! A recording notes a flat list of operations with what they read and write; nothing runs. It is a
//! value, carried by the runtime that [`record_graph`](crate::Runtime::record_graph) lends. Its end
//! packs the temporaries by liveness into the graph's arena, derives the dependencies from the
//! accesses, and hands the plan to the backend. Launching waits for the outside buffers' last uses,
//! submits one operation, and marks them.
//!
//! ```
//! use leasehold::{DeviceId, Runtime, View};
//! # fn main() -> leasehold::Result<()> {
//! let runtime = Runtime::open(DeviceId::cpu(0))?;
//! let x = runtime.upload(&[1.0f32; 64])?;
//! let y = runtime.alloc(256)?;
//! let graph = runtime.record_graph(|recording| {
//!     let scratch = recording.alloc(256)?; // has no address until the recording stops
//!     recording.stream().copy(scratch.view(), x.view())?;
//!     recording.stream().copy(y.view(), scratch.view())
//! })?;
//! graph.launch()?;
//! assert_eq!(runtime.to_vec::<f32>(&y)?, [1.0; 64]);
//! # Ok(())
//! # }
//! ```

mod budget;
mod conditional;
mod exec;
mod executables;
mod instances;
mod operator;
mod optimise;
mod record;
mod recording;
mod stop;
mod update;

pub(crate) use executables::Executables;
pub(crate) use recording::Recording;

pub use budget::GraphBudget;
pub use exec::{Graph, NodeId};
pub use executables::GraphStats;
pub use operator::GraphOperator;
pub use record::GraphRecording;
pub use stop::{LaunchCheck, Note, StopCheck};
pub use update::{GraphUpdate, UpdateOutcome};
