//! Collectives between ranks: who takes part, communicators, and calls in stream order whose order
//! and shapes are checked.
//!
//! A rank is one of several processes or threads that run a program together, each with a device. A
//! [`World`] is who takes part, a [`Comm`] makes calls of all of its ranks: sums, gathers, sends.
//! An existing library moves the elements. This crate adds what such libraries leave to their
//! users: an order, a check that all ranks call the same, and errors that name ranks.
//!
//! ```
//! use leasehold::{DeviceId, Result, Runtime};
//! use leasehold_collective::{CommConfig, Reduce, World};
//!
//! /// A step of each rank: its gradient, averaged with the others'.
//! fn rank(world: World) -> Result<Vec<f32>> {
//!     let runtime = Runtime::open(DeviceId::cpu(0))?.create_stream()?.runtime();
//!     let comm = world.comm(&runtime, &CommConfig::new("data"))?;
//!     let gradient = runtime.upload(&[world.rank() as f32, 1.0])?;
//!     let graph = runtime.record_graph(|recording| {
//!         comm.all_reduce(recording.stream(), &gradient, Reduce::Average)
//!     })?; // all ranks have recorded the same calls, or this says which differ
//!     graph.launch_on(runtime.stream())?;
//!     runtime.to_vec(&gradient)
//! }
//!
//! # fn main() -> Result<()> {
//! let ranks: Vec<_> =
//!     World::threads(4)?.into_iter().map(|w| std::thread::spawn(|| rank(w))).collect();
//! for rank in ranks {
//!     assert_eq!(rank.join().unwrap()?, [1.5, 1.0]);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Rules
//! - All ranks make the same calls of a communicator in the same order, with the same types,
//!   counts, reductions and roots. A call is recorded on all ranks or on none.
//! - Ranks that share several communicators call these in the same order too.
//! - Ranks that are threads have a stream each. Their memory is their own: two ranks that give the
//!   same buffer to a call wait for each other.
//! - Collectives of a device run one after the other, in the order of their submission.
//!
//! # Files
//! From below: `error`, [`element`], [`signature`], [`driver`]; [`store`], `cycle`, `watchdog`,
//! [`mod@world`], `order_token`, `members`; `native`, `log`, `unfinished`, [`group`]; `inner`,
//! `stop`, `window`; [`comm`], `calls`, `register`; `bench`.
//!
//! This crate must not move elements between processes itself.

#[cfg(feature = "bench")]
pub mod bench;
mod calls;
pub mod comm;
mod cycle;
pub mod driver;
pub mod element;
mod error;
pub mod group;
mod inner;
mod log;
mod members;
mod native;
mod order_token;
mod register;
pub mod signature;
mod stop;
pub mod store;
mod unfinished;
mod watchdog;
mod window;
pub mod world;

pub use comm::{Check, Comm, CommConfig};
pub use driver::{CollectiveOps, Communicator};
pub use element::{Element, ElementType, Reduce};
pub use group::Group;
pub use register::Registration;
pub use signature::{Kind, Signature};
pub use store::{FileStore, Presence, Store, TcpStore, ThreadStore};
pub use world::{Reporter, World};
