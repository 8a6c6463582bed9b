//! The managers: they own the device's resources and expose them. They do not wait, signal, copy or launch.
//!
//! | manager | owns | kind of pool |
//! |---|---|---|
//! | [`execution`] | the driver and the device manager: the top | – |
//! | [`device`] | devices, each with a context manager | fixed slots, created lazily |
//! | [`context`] | contexts, each with the managers below and the device's memory | keyed (the primary one), growable (owned ones) |
//! | [`stream`] | streams | growable, recycled, retire list |
//! | [`event`] | events: a caller's, the engine's marks, time stamps | growable, recycled |
//! | [`gate`] | timelines that the host signals | growable |
//! | [`module`] | loaded images | keyed singletons |
//! | [`function`] | functions of modules, as pipelines | keyed singletons |
//! | [`graph`] | instantiated plans | growable |
//! | `retired` | contexts that nobody leases, until nothing of them is held or pending | a list |
//! | [`buffer`] | buffers, in the allocators' block tables | growable, recycled |
//!
//! A context is made current before anything is made in it, and what was current is restored (`Door`).
//!
//! This module must not know the traits of `hal`'s devices.

pub mod buffer;
pub mod context;
pub mod device;
pub mod event;
pub mod execution;
pub mod function;
pub mod gate;
pub mod graph;
pub mod module;
pub(crate) mod retired;
pub mod stream;
