//! CubeCL's server of a device. Its commands, failures and scopes are CubeCL's own; this file says
//! in which order a call uses them.

use crate::compile::{Arguments, Kernels};
use crate::driver::Leasehold;
use crate::errors;
use crate::runtime::{ALIGNMENT, CudaRuntime, options, properties};
use crate::storage::{DeviceMemory, DevicePages};
use crate::stream::Streams;
use cubecl_common::bytes::Bytes;
use cubecl_common::device::{DeviceId, DeviceService, ServiceId};
use cubecl_common::profile::ProfileDuration;
use cubecl_core::CubeCount;
use cubecl_core::device::ServerUtilitiesHandle;
use cubecl_core::server::{
    BufferBinding, CopyDescriptor, Handle, KernelArguments, KernelResource, ProfileError,
    ProfilingToken, ServerCommunication, ServerError, ServerStorage, ServerUtilities,
};
use cubecl_environment::backtrace::BackTrace;
use cubecl_environment::future::{self, DynFut};
use cubecl_environment::stream::StreamId;
use cubecl_server::allocator::PitchedMemoryLayoutPolicy;
use cubecl_server::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl_server::dry_run::LaunchMode;
use cubecl_server::id::KernelId;
use cubecl_server::kernel::CubeKernel;
use cubecl_server::logging::ServerLogger;
use cubecl_server::memory_management::{
    ManagedMemoryHandle, MemoryAllocationMode, StreamMemoryReport,
};
use cubecl_server::runtime::Runtime;
use cubecl_server::server::Server;
use cubecl_server::storage::ManagedResource;
use cubecl_server::stream::{
    ExecuteScope, FailureStore, MultiStream, StreamCapture, WriteScoped, failed_writing,
};
use std::collections::HashMap;
use std::sync::Arc;

type Command<'a> = cubecl_server::command::Command<'a, Leasehold>;

/// A device.
#[derive(Debug)]
pub struct CudaServer {
    kernels: Kernels,
    streams: MultiStream<Streams>,
    utilities: Arc<ServerUtilities>,
    /// Modes of streams that do not exist yet.
    modes: HashMap<StreamId, MemoryAllocationMode>,
}

impl DeviceService for CudaServer {
    fn init(device: DeviceId) -> Self {
        // CubeCL has no way to refuse a device; a panic here reaches the caller with its text.
        let runtime = crate::open::open(device.index_id)
            .unwrap_or_else(|error| panic!("Leasehold cannot open the device: {error}"));
        let properties = properties(&runtime);
        let logger = Arc::new(ServerLogger::default());
        let (utilities, captures) = ServerUtilities::init(
            ServiceId::of::<Self>(device),
            "cuda",
            properties.clone(),
            CudaRuntime::target_properties(),
            logger.clone(),
            PitchedMemoryLayoutPolicy::new(ALIGNMENT as usize),
        );
        let memory = properties.memory.clone();
        let streams = Streams { runtime, memory, logger: logger.clone(), captures };
        let most = CubeClRuntimeConfig::get().streaming.max_streams;
        Self {
            kernels: Kernels::new(options(), properties),
            streams: MultiStream::new(logger, streams, most),
            utilities: Arc::new(utilities),
            modes: HashMap::new(),
        }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone() as ServerUtilitiesHandle
    }
}

impl ServerCommunication for CudaServer {}

impl WriteScoped for CudaServer {
    type Streams = MultiStream<Streams>;

    fn write_streams(&mut self) -> &mut Self::Streams {
        &mut self.streams
    }

    fn on_failure(&mut self, _: StreamId, error: &ServerError) {
        self.kernels.profiler.failure(error);
    }

    fn capturing(&mut self, stream: StreamId) -> Option<&mut StreamCapture> {
        self.streams.try_stream_mut(&stream).map(|stream| &mut stream.capturing)
    }
}

impl CudaServer {
    /// A command on a stream, behind the streams of the buffers.
    fn command<'a>(
        &mut self,
        stream: StreamId,
        buffers: impl Iterator<Item = &'a BufferBinding>,
    ) -> Result<Command<'_>, ServerError> {
        let mut streams = self.streams.resolve(stream, buffers)?;
        if let Some(mode) = self.modes.remove(&stream) {
            cubecl_server::command::DeviceStream::device_memory(streams.current()).mode(mode);
        }
        Ok(Command::new(&mut self.kernels, streams, self.utilities.service))
    }

    fn plain(&mut self, stream: StreamId) -> Result<Command<'_>, ServerError> {
        self.command(stream, [].into_iter())
    }

    /// The blocks of a launch. A dynamic count is read back, as CubeCL's own runtime does.
    fn blocks(
        &mut self,
        count: CubeCount,
        stream: StreamId,
    ) -> Result<(u32, u32, u32), ServerError> {
        let binding = match count {
            CubeCount::Static(x, y, z) => return Ok((x, y, z)),
            CubeCount::Dynamic(binding) => binding,
        };
        self.streams.ensure_written([&binding].into_iter())?;
        let mut command = self.command(stream, [&binding].into_iter())?;
        let words = CopyDescriptor::new(binding, [3].into(), [1].into(), 4);
        let bytes = future::block_on(command.read_async(vec![words]))?;
        match bytemuck::cast_slice(&bytes[0]) {
            &[x, y, z] => Ok((x, y, z)),
            other => Err(ServerError::Generic {
                reason: format!("a dynamic count of blocks has 3 numbers, not {}", other.len()),
                backtrace: BackTrace::capture(),
            }),
        }
    }

    /// Memory with these words, which launches with the same ones share.
    fn words(command: &mut Command<'_>, words: &[u64]) -> Result<Handle, ServerError> {
        let stream = command.stream();
        stream.infos.mode(stream.capturing.cache_mode());
        let keep = stream.infos.should_cache(size_of_val(words));
        if keep && let Some(handle) = stream.infos.get(words) {
            return Ok(handle);
        }
        let handle = command.create_with_data(bytemuck::cast_slice(words))?;
        if keep {
            command.stream().infos.insert(words.to_vec(), handle.clone());
        }
        Ok(handle)
    }

    fn enqueue(
        &mut self,
        kernel: KernelId,
        count: (u32, u32, u32),
        bindings: KernelArguments,
        stream: StreamId,
    ) -> Result<(), ServerError> {
        let mut command = self.command(stream, bindings.buffers())?;
        let info = &bindings.info;
        let (fixed, dynamic) =
            info.data.split_at(info.dynamic_metadata_offset.min(info.data.len()));
        let params = bytemuck::cast_slice(fixed).to_vec();
        let metadata = match dynamic {
            [] => None,
            words => Some(Self::words(&mut command, words)?),
        };
        let metadata = metadata.map(|handle| command.resource(handle.binding())).transpose()?;
        let mut buffers = Vec::with_capacity(bindings.resources.len());
        for resource in bindings.resources {
            match resource {
                KernelResource::Buffer(binding) => buffers.push(command.resource(binding)?),
                KernelResource::TensorMap(_) => return Err(errors::refused("tensor maps")),
            }
        }
        let mut arguments = Arguments { buffers, metadata, params };
        Ok(command.kernel(kernel, count, &mut arguments)?)
    }
}

impl Server for CudaServer {
    fn logger(&self) -> Arc<ServerLogger> {
        self.streams.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities> {
        self.utilities.clone()
    }

    fn staging(&mut self, sizes: &[usize], stream: StreamId) -> Result<Vec<Bytes>, ServerError> {
        let mut command = self.plain(stream)?;
        Ok(sizes.iter().map(|&size| command.reserve_cpu(size, None)).collect())
    }

    fn initialize_memory(
        &mut self,
        memory: ManagedMemoryHandle,
        size: u64,
        stream: StreamId,
    ) -> Result<(), ServerError> {
        let made = self.plain(stream).and_then(|mut command| {
            command.initialize_memory(memory.clone(), size).map_err(ServerError::from)
        });
        if let Err(error) = &made {
            self.streams.fail_unallocated(&memory, error.clone());
        }
        made
    }

    fn read(
        &mut self,
        descriptors: Vec<CopyDescriptor>,
        stream: StreamId,
    ) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        let written = self.streams.ensure_written(descriptors.iter().map(|of| &of.handle));
        let command =
            written.and_then(|()| self.command(stream, descriptors.iter().map(|of| &of.handle)));
        match command {
            Ok(mut command) => Box::pin(command.read_async(descriptors)),
            Err(error) => Box::pin(async move { Err(error) }),
        }
    }

    fn write(&mut self, descriptors: Vec<(CopyDescriptor, Bytes)>, stream: StreamId) {
        // Each copy in a scope of its own: the failure of one says nothing of the next.
        for (descriptor, data) in descriptors {
            let mut written = self.write_set();
            written.push(descriptor.handle.clone());
            ExecuteScope::over(self, stream, written).execute(|server| {
                let mut command = server.command(stream, [&descriptor.handle].into_iter())?;
                command.write_to_gpu(descriptor, data).map_err(Into::into)
            });
        }
    }

    unsafe fn launch(
        &mut self,
        kernel: Box<dyn CubeKernel>,
        count: CubeCount,
        bindings: KernelArguments,
        stream: StreamId,
        mode: LaunchMode,
    ) {
        let id = kernel.id();
        if !self.kernels.has(&id) {
            let logger = self.streams.logger.clone();
            if let Err(error) = self.kernels.compile(&id, &*kernel, &logger) {
                let error = ServerError::Launch(error);
                if mode.is_skipped() {
                    self.kernels.profiler.failure(&error);
                } else {
                    // What the caller declared: nothing else is known of such a kernel.
                    let mut written = self.write_set();
                    written.extend(bindings.buffers_written(None).cloned());
                    failed_writing(self, stream, written, error);
                }
                return;
            }
        }
        if mode.is_skipped() {
            return;
        }
        let io = self.kernels.io(&id);
        let mut written = self.write_set();
        written.extend(bindings.buffers_written(io.as_deref()).cloned());
        let count = match self.blocks(count, stream) {
            Ok(count) => count,
            Err(error) => return failed_writing(self, stream, written, error),
        };
        if count.0 == 0 || count.1 == 0 || count.2 == 0 {
            return;
        }
        let read = bindings.buffers_read(io.as_deref());
        ExecuteScope::launching(self, id.clone(), stream, read, written)
            .execute(|server| server.enqueue(id, count, bindings, stream));
    }

    fn check(&mut self, handles: Vec<BufferBinding>, _: StreamId) -> Result<(), ServerError> {
        self.streams.ensure_written(handles.iter())
    }

    fn sync(
        &mut self,
        handles: Vec<BufferBinding>,
        stream: StreamId,
    ) -> DynFut<Result<(), ServerError>> {
        let written = self.streams.ensure_written(handles.iter());
        match written.and_then(|()| self.plain(stream)) {
            Ok(mut command) => command.sync(),
            Err(error) => Box::pin(async move { Err(error) }),
        }
    }

    fn flush(&mut self, stream: StreamId) -> Result<(), ServerError> {
        self.plain(stream)?.flush_drops();
        Ok(())
    }

    fn memory_report(&mut self, stream: StreamId) -> Option<StreamMemoryReport> {
        self.streams.try_stream_mut(&stream)?;
        self.plain(stream).ok().map(|mut command| command.memory_report())
    }

    fn stream_ids(&self) -> Vec<StreamId> {
        self.streams.stream_ids().collect()
    }

    fn memory_cleanup(&mut self, stream: StreamId) -> Result<(), ServerError> {
        self.plain(stream)?.memory_cleanup()
    }

    fn start_profile(&mut self, stream: StreamId) -> Result<ProfilingToken, ServerError> {
        // By the host's clock, so both ends of a window wait for the stream.
        future::block_on(self.sync(Vec::new(), stream))?;
        Ok(self.kernels.profiler.start())
    }

    fn end_profile(
        &mut self,
        stream: StreamId,
        token: ProfilingToken,
    ) -> Result<ProfileDuration, ProfileError> {
        if let Err(error) = future::block_on(self.sync(Vec::new(), stream)) {
            self.kernels.profiler.abandon(token);
            return Err(ProfileError::from(&error));
        }
        self.kernels.profiler.stop(token)
    }

    fn abandon_profile(&mut self, _: StreamId, token: ProfilingToken) {
        self.kernels.profiler.abandon(token);
    }

    fn allocation_mode(&mut self, mode: MemoryAllocationMode, stream: StreamId) {
        match self.streams.try_stream_mut(&stream) {
            Some(stream) => {
                cubecl_server::command::DeviceStream::device_memory(stream).mode(mode);
            }
            None => {
                self.modes.insert(stream, mode);
            }
        }
    }
}

impl ServerStorage for CudaServer {
    type Storage = DevicePages;

    fn get_resource(
        &mut self,
        binding: BufferBinding,
        stream: StreamId,
    ) -> Result<ManagedResource<DeviceMemory>, ServerError> {
        self.streams.ensure_written([&binding].into_iter())?;
        let mut command = self.command(stream, [&binding].into_iter())?;
        Ok(command.managed_resource(binding)?)
    }
}
