//! The managers: pools that own the device's resources and expose them. Managers do not wait,
//! signal, copy or launch.
//!
//! | manager | owns | kind of pool |
//! |---|---|---|
//! | [`execution`] | the driver and the device manager: the top | – |
//! | [`device`] | devices, each with a context manager | fixed slots, created lazily |
//! | [`context`] | contexts, each with the managers below | keyed (primary), growable (owned) |
//! | [`stream`] | streams | growable, recycled, retire list |
//! | [`event`] | events: a caller's, the engine's marks, time stamps | growable, recycled |
//! | [`gate`] | host timelines | growable |
//! | [`module`] | loaded images | keyed singletons |
//! | [`function`] | functions of modules, as pipelines | keyed singletons |
//! | [`graph`] | instantiated plans | growable |
//! | `retired` | contexts without a lease, until they are idle and unused | a list |
//! | [`buffer`] | buffers, in the allocators' block tables | growable, recycled |
//!
//! A manager makes a context current before it makes an object in it, and then restores the former
//! context (`Door`).
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
