//! Compute pipelines: one for each library, function and description. A pipeline holds a lease on
//! its library.
//!
//! This module must not know which kernels exist.

use super::library_state::LibraryState;
use super::opened::{OpenedDevice, Owned};
use super::pool::{DeviceResource, PoolOf};
use crate::config::MpsConfig;
use crate::driver::ops::{NativePipeline, PipelineDesc, PipelineInfo};
use leasehold_core::sync::Arc;
use leasehold_core::{
    Handle, Lease, LibraryHandle, PoolConfig, Recycle, Resource, Result, Tagged, tags,
};
use std::marker::PhantomPinned;

/// A library, a function of it, and the description of its pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Key {
    library: LibraryHandle,
    function: Box<str>,
    desc: PipelineDesc,
}

impl Key {
    pub(super) fn of(library: &Lease<LibraryState>, function: &str, desc: &PipelineDesc) -> Self {
        Self { library: library.handle(), function: function.into(), desc: desc.clone() }
    }
}

/// A compute pipeline.
#[derive(Debug)]
pub struct ComputePipelineState {
    owned: Owned<NativePipeline>,
    info: PipelineInfo,
    function: Box<str>,
    library: Lease<LibraryState>,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl ComputePipelineState {
    /// The driver's pipeline.
    pub fn native(&self) -> NativePipeline {
        self.owned.native
    }

    /// The pipeline's limits.
    pub fn info(&self) -> PipelineInfo {
        self.info
    }

    /// The name of its function.
    pub fn function(&self) -> &str {
        &self.function
    }

    /// Its library.
    pub fn library(&self) -> &Lease<LibraryState> {
        &self.library
    }
}

impl Tagged for ComputePipelineState {
    type Tag = tags::Pipeline;
}

impl Drop for ComputePipelineState {
    fn drop(&mut self) {
        self.library.pipeline_ended();
    }
}

/// The compute pipelines of a device, as their pool makes them.
#[derive(Debug)]
pub struct Pipelines {
    device: Arc<OpenedDevice>,
}

impl Resource for Pipelines {
    type Payload = ComputePipelineState;
    type Request<'a> = (&'a Lease<LibraryState>, &'a str, &'a PipelineDesc);
    const NAME: &'static str = "compute pipeline state";

    fn create(
        &self,
        _: Handle<tags::Pipeline>,
        (library, name, desc): &(&Lease<LibraryState>, &str, &PipelineDesc),
    ) -> Result<ComputePipelineState> {
        let ops = &self.device.ops;
        // SAFETY: the lease keeps the library live.
        let function = unsafe { ops.function(library.native(), name)? };
        let function = Owned::new(&self.device, function);
        // SAFETY: the device is open, `function` is live, and both are of one device, because the
        // library is of this manager's device.
        let native = unsafe { ops.pipeline_create(self.device.native, function.native, desc)? };
        let owned = Owned::new(&self.device, native);
        // SAFETY: `owned` keeps the pipeline live.
        let info = unsafe { ops.pipeline_info(native)? };
        library.pipeline_made();
        Ok(ComputePipelineState {
            owned,
            info,
            function: (*name).into(),
            library: (*library).clone(),
            _place: PhantomPinned,
        })
    }

    fn recycle(&self, _: &mut ComputePipelineState) -> Recycle {
        Recycle::Destroy
    }
}

impl DeviceResource for Pipelines {
    fn on(device: &Arc<OpenedDevice>, _: &MpsConfig) -> (Self, PoolConfig) {
        (Self { device: device.clone() }, PoolConfig::default())
    }
}

/// Owns the compute pipelines of a device. A part of its [`LibraryManager`].
///
/// [`LibraryManager`]: super::library::LibraryManager
#[doc(alias("ComputePipelineState", "MpsComputePipelineStateManager"))]
pub type ComputePipelineStateManager = PoolOf<Pipelines, Key>;
