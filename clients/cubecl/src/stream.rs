//! CubeCL's stream: a lane, and the state that CubeCL keeps beside it.

use crate::errors;
use crate::lane::{Fence, Lane};
use crate::storage::{DevicePages, HostPages};
use cubecl_core::MemoryConfiguration;
use cubecl_core::ir::MemoryDeviceProperties;
use cubecl_server::command::DeviceStream;
use cubecl_server::logging::ServerLogger;
use cubecl_server::memory_management::drop_queue::{Fence as _, PendingDropQueue};
use cubecl_server::memory_management::{
    ErrorGraph, FailureId, MemoryAllocationMode, MemoryManagement, MemoryManagementOptions,
};
use cubecl_server::metadata_cache::{MetadataCachePolicy, MetadataInfoCache};
use cubecl_server::server::{BufferBinding, DeviceCaptures, Handle, ServerError};
use cubecl_server::storage::PINNED_MEMORY_ALIGNMENT;
use cubecl_server::stream::{EventStreamBackend, StreamCapture, StreamMemory};
use leasehold::Runtime;
use std::sync::Arc;

#[derive(Debug)]
pub struct CubeStream {
    pub(crate) lane: &'static Lane,
    device: MemoryManagement<DevicePages>,
    host: MemoryManagement<HostPages>,
    drops: PendingDropQueue<Fence>,
    pub(crate) capturing: StreamCapture,
    pub(crate) infos: MetadataInfoCache<Handle>,
}

impl StreamMemory for CubeStream {
    fn failure(&self, binding: &BufferBinding) -> Option<FailureId> {
        self.device.failure(&binding.memory, binding.range())
    }

    fn taint(&mut self, binding: &BufferBinding, failure: FailureId, failures: &mut ErrorGraph) {
        self.device.taint(&binding.memory, binding.range(), failure, failures);
    }

    fn written(&mut self, binding: &BufferBinding, failures: &mut ErrorGraph) {
        self.device.written(&binding.memory, binding.range(), failures);
    }
}

impl DeviceStream for CubeStream {
    type Fence = Fence;
    type DeviceStorage = DevicePages;
    type HostStorage = HostPages;
    type Signal = &'static Lane;

    fn device_memory(&mut self) -> &mut MemoryManagement<DevicePages> {
        &mut self.device
    }

    fn host_memory(&mut self) -> &mut MemoryManagement<HostPages> {
        &mut self.host
    }

    fn drop_queue(&mut self) -> &mut PendingDropQueue<Fence> {
        &mut self.drops
    }

    fn capturing(&mut self) -> &mut StreamCapture {
        &mut self.capturing
    }

    fn info_cache(&mut self) -> &mut MetadataInfoCache<Handle> {
        &mut self.infos
    }

    fn signal(&self) -> &'static Lane {
        self.lane
    }

    fn fence(signal: &'static Lane) -> Fence {
        Fence::new(signal)
    }
}

/// The streams of a device.
pub struct Streams {
    pub(crate) runtime: Runtime,
    pub(crate) memory: MemoryDeviceProperties,
    pub(crate) logger: Arc<ServerLogger>,
    pub(crate) captures: DeviceCaptures,
}

impl std::fmt::Debug for Streams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Streams({})", self.runtime.device())
    }
}

impl EventStreamBackend for Streams {
    type Stream = CubeStream;
    type Event = Fence;

    fn create_stream(&self) -> Result<CubeStream, ServerError> {
        let lane = Lane::new(&self.runtime).map_err(|error| errors::server(&error))?;
        let device = MemoryManagement::from_configuration(
            DevicePages::new(lane),
            &self.memory,
            // A page for each allocation: the runtime orders uses of whole pages, and a failure
            // stays with what the failed work wrote.
            MemoryConfiguration::ExclusivePages,
            self.logger.clone(),
            MemoryManagementOptions::new("Leasehold's memory"),
        );
        let host = MemoryManagement::from_configuration(
            HostPages::default(),
            &MemoryDeviceProperties::new(self.memory.max_page_size, PINNED_MEMORY_ALIGNMENT as u64),
            MemoryConfiguration::default(),
            self.logger.clone(),
            MemoryManagementOptions::new("Host memory").mode(MemoryAllocationMode::Auto),
        );
        Ok(CubeStream {
            lane,
            device,
            host,
            drops: PendingDropQueue::default(),
            capturing: StreamCapture::new(&self.captures),
            infos: MetadataInfoCache::new(MetadataCachePolicy::default()),
        })
    }

    fn handle_cursor(stream: &CubeStream, handle: &BufferBinding) -> u64 {
        stream.device.get_cursor(handle.memory.clone()).unwrap_or(u64::MAX)
    }

    fn flush(stream: &mut CubeStream, _: &mut ErrorGraph) -> Fence {
        Fence::new(stream.lane)
    }

    fn wait_event(_: &mut CubeStream, _: Fence) -> Result<(), ServerError> {
        // The runtime orders the streams by the accesses of their work.
        Ok(())
    }

    fn wait_event_sync(event: Fence) -> Result<(), ServerError> {
        event.wait()
    }
}
