//! The items that most programs use: `use leasehold::prelude::*;`.
//!
//! ```
//! use leasehold::prelude::*;
//! # fn main() -> Result<()> {
//! let runtime = Runtime::open(DeviceId::cpu(0))?;
//! let x = runtime.upload(&[1.0f32, 2.0])?;
//! assert_eq!(runtime.to_vec(&x)?, [1.0, 2.0]);
//! # Ok(())
//! # }
//! ```

pub use crate::array::{Array, ArrayView};
pub use crate::context::Context;
pub use crate::event::{Event, EventFlags};
pub use crate::graph::{Graph, GraphOperator, GraphUpdate};
pub use crate::host_timeline::HostTimeline;
pub use crate::kernel::{CpuArgs, Grid, KernelBase, KernelCheck, KernelDesc, KernelSource};
pub use crate::partition::Divide;
pub use crate::runtime::Runtime;
pub use crate::stream::Stream;
pub use crate::view::{BufferView, Operand, View};
pub use leasehold_alloc::Buffer;
pub use leasehold_core::{Error, Lease, Name, Result, Timepoint};
pub use leasehold_hal::{Access, DeviceId};
