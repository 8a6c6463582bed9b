//! The managers: pools that own the device's resources and expose them. Managers do not wait,
//! signal, copy or launch.
//!
//! - [`execution`]. Owns: the driver and the device manager: the top. Kind of pool: –.
//! - [`device`]. Owns: devices, each with the managers below. Kind of pool: fixed slots, created
//!   lazily.
//! - [`command_queue`]. Owns: the command queues. Kind of pool: a few keyed singletons.
//! - [`library`]. Owns: libraries and their compute pipelines. Kind of pool: keyed singletons.
//! - [`compute_pipeline_state`]. Owns: compute pipelines. Kind of pool: keyed singletons.
//! - [`kernel`]. Owns: kernels, which hold compute pipelines. Kind of pool: keyed singletons.
//! - [`heap`]. Owns: heaps, any number for a device. Kind of pool: growable, recycled.
//! - [`buffer`]. Owns: buffers, with or without a heap. Kind of pool: growable, recycled.
//! - [`event`]. Owns: events and shared events. Kind of pool: growable, recycled.
//! - [`fence`]. Owns: fences. Kind of pool: growable, recycled.
//! - [`stream`]. Owns: streams, which share the queues. Kind of pool: growable, recycled.
//! - [`graph`]. Owns: instantiated plans. Kind of pool: growable.
//! - [`timestamp`]. Owns: timestamps, in slots of sample buffers. Kind of pool: growable, recycled.
//!
//! [`pool`] has what the managers have alike, from queues to fences, and timestamps.
//!
//! A resource holds its device open, and a buffer holds its heap. So the order of drops is never
//! wrong, although each manager only knows the manager below it.
//!
//! A lease says nothing about work. The holder of a lease keeps it until the work that uses the
//! resource is over, as Metal demands of command buffers without retained references.
//!
//! This module must not know the traits of `hal`'s devices.

mod library_state;
pub(crate) mod opened;

pub mod buffer;
pub mod command_queue;
pub mod compute_pipeline_state;
pub mod device;
pub mod event;
pub mod execution;
pub mod fence;
pub mod graph;
pub mod heap;
pub mod kernel;
pub mod library;
pub mod pool;
pub mod stream;
pub mod timestamp;
