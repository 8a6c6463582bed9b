//! The managers: pools that own the device's resources and expose them. Managers do not wait,
//! signal, copy or launch.
//!
//! - [`execution`]. Owns: the driver and the device manager: the top. Kind of pool: –.
//! - [`device`]. Owns: devices, each with a context manager. Kind of pool: fixed slots, created
//!   lazily.
//! - [`context`]. Owns: contexts, each with the managers below. Kind of pool: keyed (primary),
//!   growable (owned).
//! - [`stream`]. Owns: streams. Kind of pool: growable, recycled, retire list.
//! - [`event`]. Owns: events: a caller's, the engine's recorded events, timestamps. Kind of pool:
//!   growable, recycled.
//! - [`external`]. Owns: the timelines of other libraries' streams. Kind of pool: a table by
//!   handle.
//! - [`host_timeline`]. Owns: host timelines. Kind of pool: growable.
//! - [`module`]. Owns: loaded images. Kind of pool: keyed singletons.
//! - [`function`]. Owns: functions of modules, as pipelines. Kind of pool: keyed singletons.
//! - [`graph`]. Owns: instantiated plans. Kind of pool: growable.
//! - [`buffer`]. Owns: buffers, in the allocators' block tables. Kind of pool: growable, recycled.
//!
//! A manager makes a context current before it makes an object in it, and then restores the former
//! context (`DriverContext`).
//!
//! This module must not know the traits of `hal`'s devices.

pub mod buffer;
pub mod context;
pub mod device;
pub mod event;
pub mod execution;
pub mod external;
pub mod function;
pub mod graph;
pub mod host_timeline;
pub mod module;
pub mod stream;
