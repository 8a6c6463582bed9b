//! Streams and events of the simulated driver.
//!
//! This module must not know managers.

use super::tables::{Event, NodeKind, Partition, Stream, Tables};
use super::{Scope, SimDriver, call_back, memory, refuse};
use crate::{
    Command, FillCall, Kernel, KernelBody, KernelCall, KernelSpec, Meet, Node, PartitionId,
    Transfer,
};
use leasehold_core::{Error, Result};
use leasehold_cuda::driver::codes::code;
use leasehold_cuda::driver::ops::{
    CopyKind, EventFlags, EventOps, HostFunction, Launch, NativeBatch, NativeContext, NativeCopy,
    NativeEvent, NativeFill, NativePartition, NativeStream, Progress, SourceOrder, StreamOps,
};
use leasehold_hal::{Access, Binding, TensorMap};
use std::sync::Arc;

/// Work that both streams and graphs take.
pub(super) enum Work {
    Kernel(KernelCall, u64),
    Copy(Transfer, CopyKind),
    Fill(FillCall),
    Write { addr: u64, value: u64 },
    Wait { addr: u64, value: u64 },
    Meet(Meet),
}

impl Work {
    pub(super) fn node(self) -> (Node, NodeKind) {
        match self {
            Work::Kernel(call, context) => (Node::Kernel(call), NodeKind::Kernel { context }),
            Work::Copy(copy, kind) => (Node::Copy(copy), NodeKind::Copy { kind, rows: copy.rows }),
            Work::Fill(fill) => (Node::Fill(fill), NodeKind::Fill),
            Work::Write { addr, value } => (Node::WriteValue { addr, value }, NodeKind::Other),
            Work::Wait { addr, value } => (Node::WaitValue { addr, value }, NodeKind::Other),
            Work::Meet(meet) => (Node::Meet(meet), NodeKind::Other),
        }
    }

    fn command(self) -> Command {
        match self {
            Work::Kernel(call, _) => Command::Kernel(call),
            Work::Copy(copy, _) => Command::Copy(copy),
            Work::Fill(fill) => Command::Fill(fill),
            Work::Write { addr, value } => Command::WriteValue { addr, value },
            Work::Wait { addr, value } => Command::WaitValue { addr, value },
            Work::Meet(meet) => Command::Meet(meet),
        }
    }
}

impl Tables {
    /// Whether each mapping in a range is accessible to some device.
    fn is_reachable(&self, first: u64, last: u64) -> bool {
        let touched = self
            .mappings
            .range(..=last)
            .rev()
            .take_while(|&(&at, mapping)| at + mapping.bytes > first);
        touched.into_iter().all(|(_, mapping)| mapping.reachable)
    }

    /// A partition whose context is current.
    pub(super) fn partition(
        &self,
        api: &'static str,
        scope: Scope,
        partition: NativePartition,
    ) -> Result<Partition> {
        match self.partitions.get(&partition.0) {
            Some(found) if found.context == scope.context => Ok(*found),
            Some(_) => Err(refuse(api, code::INVALID_CONTEXT)),
            None => Err(refuse(api, code::CONTEXT_IS_DESTROYED)),
        }
    }

    /// As [`kernel_call`](Self::kernel_call), for a node on a partition, unless `on` is null.
    pub(super) fn kernel_call_on(
        &self,
        api: &'static str,
        scope: Scope,
        launch: &Launch<'_>,
        on: NativePartition,
    ) -> Result<Work> {
        let partition = match on {
            NativePartition::NULL => None,
            on => Some(self.partition(api, scope, on)?.id),
        };
        match self.kernel_call(api, scope, launch)? {
            Work::Kernel(call, context) => {
                Ok(Work::Kernel(KernelCall { partition, ..call }, context))
            }
            other => Ok(other),
        }
    }

    /// A launch in the machine's form, with the driver's checks.
    pub(super) fn kernel_call(
        &self,
        api: &'static str,
        scope: Scope,
        launch: &Launch<'_>,
    ) -> Result<Work> {
        let function = self
            .functions
            .get(&launch.function.0)
            .ok_or_else(|| refuse(api, code::INVALID_HANDLE))?;
        if function.context != scope.context {
            return Err(refuse(api, code::INVALID_CONTEXT));
        }
        let kernel = &function.kernel;
        let threads = launch.block.iter().fold(1_u64, |n, &b| n.saturating_mul(u64::from(b)));
        let fits = |sizes: [u32; 3], limits: [u32; 3]| {
            sizes.iter().zip(limits).all(|(&size, limit)| size - 1 < limit)
        };
        let zero = launch.grid.contains(&0) || launch.block.contains(&0);
        if zero
            || !fits(launch.grid, memory::GRID)
            || !fits(launch.block, memory::BLOCK)
            || threads > u64::from(kernel.spec.block_threads.min(memory::BLOCK_THREADS))
            || launch.shared > function.shared
        {
            return Err(refuse(api, code::INVALID_VALUE));
        }
        let pointers = kernel.spec.params_at();
        let params = kernel.spec.params as usize;
        if launch.bindings.len() != kernel.spec.bindings.len() {
            return Err(Error::invalid(format!(
                "kernel {}: a launch with {} bindings, the function takes {}",
                kernel.name,
                launch.bindings.len(),
                kernel.spec.bindings.len()
            )));
        }
        // A structure may be padded behind the last of a kernel's parameters.
        let padding = if function.params.is_none() || params == 0 {
            0
        } else if kernel.spec.maps {
            TensorMap::ALIGNMENT as usize - 1
        } else {
            7
        };
        // The word of the grant is behind the parameters, of which an emulated function has it as
        // one.
        let word = if kernel.spec.early { size_of::<u32>() } else { 0 };
        let params = params + word;
        if launch.early.is_some_and(|bits| !launch.args.ends_with(&bits.to_le_bytes())) {
            return Err(Error::invalid(format!(
                "kernel {}: its last argument is no grant of early reads",
                kernel.name
            )));
        }
        match launch.args.len() {
            less if less < pointers + params => return Err(refuse(api, code::INVALID_VALUE)),
            more if more > pointers + params + padding => {
                return Err(refuse(api, code::LAUNCH_OUT_OF_RESOURCES));
            }
            _ => {}
        }
        for (i, (word, binding)) in launch.args.chunks_exact(8).zip(launch.bindings).enumerate() {
            if word != binding.addr.to_le_bytes() {
                return Err(Error::invalid(format!(
                    "kernel {}: argument {i} is another address than binding {i} ({:#x})",
                    kernel.name, binding.addr
                )));
            }
        }
        let call = KernelCall {
            kernel: kernel.clone(),
            grid: launch.grid,
            block: launch.block,
            shared: launch.shared,
            cluster: launch.attributes.map_or([1; 3], |a| a.cluster),
            cooperative: launch.attributes.is_some_and(|a| a.cooperative),
            bindings: launch.bindings.to_vec(),
            params: launch.args[pointers..launch.args.len() - word].to_vec(),
            early: launch.early.unwrap_or(0),
            dependent: false,
            partition: None,
        };
        Ok(Work::Kernel(call, scope.context))
    }
}

impl SimDriver {
    /// Whether a device can access a range. Pinned memory is accessible. Other ranges are
    /// accessible if their first and last byte are memory of a device and no mapping in the range
    /// lacks access.
    fn is_device_range(&self, addr: u64, bytes: u64) -> bool {
        let Some(last) = addr.checked_add(bytes.max(1) - 1) else { return false };
        let owned = self.machine.owner(addr).is_some() && self.machine.owner(last).is_some();
        owned && self.lock().is_reachable(addr, last) || self.machine.is_pinned(addr, bytes)
    }

    /// A copy in the machine's form, with the checks that the driver makes at the call.
    ///
    /// # Safety
    /// - The host's side, if the copy has one, may be read or written until the copy is over.
    pub(super) unsafe fn checked_copy(&self, api: &'static str, copy: &NativeCopy) -> Result<Work> {
        let (src, dst) = ((copy.src, copy.src_pitch), (copy.dst, copy.dst_pitch));
        let mut transfer = Transfer::rows(src, dst, copy.width, copy.rows);
        if copy.kind != CopyKind::DeviceToDevice {
            // SAFETY: the caller vouches for the host's side.
            transfer = unsafe { transfer.with_host() };
        }
        if copy.width == 0 || copy.rows == 0 {
            return Ok(Work::Copy(transfer, copy.kind));
        }
        let extent =
            |pitch: u64| (copy.rows - 1).checked_mul(pitch).and_then(|e| e.checked_add(copy.width));
        let (from, to) = (extent(copy.src_pitch), extent(copy.dst_pitch));
        let pitched =
            copy.rows == 1 || (copy.src_pitch >= copy.width && copy.dst_pitch >= copy.width);
        let (Some(from), Some(to), true) = (from, to, pitched) else {
            return Err(refuse(api, code::INVALID_VALUE));
        };
        let source = copy.kind == CopyKind::HostToDevice || self.is_device_range(copy.src, from);
        let target = copy.kind == CopyKind::DeviceToHost || self.is_device_range(copy.dst, to);
        let null = copy.src == 0 || copy.dst == 0;
        if source && target && !null {
            Ok(Work::Copy(transfer, copy.kind))
        } else {
            Err(refuse(api, code::INVALID_VALUE))
        }
    }

    /// A fill in the machine's form, with the checks that the driver makes at the call.
    pub(super) fn checked_fill(&self, api: &'static str, fill: &NativeFill) -> Result<Work> {
        if !matches!(fill.width, 1 | 2 | 4) {
            return Err(Error::invalid(format!(
                "a fill's pattern has 1, 2 or 4 bytes, not {}",
                fill.width
            )));
        }
        let bytes = fill
            .count
            .checked_mul(u64::from(fill.width))
            .ok_or_else(|| refuse(api, code::INVALID_VALUE))?;
        let aligned = fill.dst.is_multiple_of(u64::from(fill.width));
        if !aligned || (bytes != 0 && !self.is_device_range(fill.dst, bytes)) {
            return Err(refuse(api, code::INVALID_VALUE));
        }
        Ok(Work::Fill(FillCall::linear(fill.dst, bytes, fill.value, fill.width)))
    }

    /// Makes a stream, on a partition if one is named.
    pub(super) fn new_stream(
        &self,
        api: &'static str,
        scope: Scope,
        partition: Option<(NativePartition, PartitionId)>,
    ) -> Result<NativeStream> {
        let queue = self
            .machine
            .queue_create_on(scope.device, partition.map(|(_, id)| id))
            .map_err(|e| self.told(api, scope.device, 0, e))?;
        let mut tables = self.lock();
        let handle = tables.handle();
        let partition = partition.map_or(0, |(name, _)| name.0);
        tables.streams.insert(handle, Stream { context: scope.context, queue, partition });
        Ok(NativeStream(handle))
    }

    /// Gives work to a stream. If the stream is captured, the work becomes a node.
    fn give(
        &self,
        api: &'static str,
        scope: Scope,
        stream: NativeStream,
        work: Work,
    ) -> Result<Stream> {
        self.ensure_default(scope, stream)?;
        let mut tables = self.lock();
        let (handle, stream) = tables.stream(api, scope, stream)?;
        let given = match tables.capture_of(handle) {
            Some(capture) => {
                let (node, kind) = work.node();
                tables.capture_node(&self.machine, api, capture, handle, node, kind)
            }
            None => self.machine.enqueue(stream.queue, work.command()),
        };
        drop(tables);
        given.map_err(|e| self.told(api, scope.device, 0, e))?;
        Ok(stream)
    }

    /// Makes a copy from pageable memory. The command holds a copy of the bytes, so the caller may
    /// change them at once.
    ///
    /// # Safety
    /// - The source may be read now.
    unsafe fn upload(&self, transfer: &Transfer) -> Work {
        let mut bytes = Vec::with_capacity((transfer.width * transfer.rows) as usize);
        let mut bindings = Vec::new();
        for row in 0..transfer.rows {
            let from = transfer.src + row * transfer.src_pitch;
            // The host reads its memory during this call.
            self.machine.host_read(from, transfer.width);
            // SAFETY: the caller vouches for the source.
            bytes.extend_from_slice(unsafe {
                std::slice::from_raw_parts(from as *const u8, transfer.width as usize)
            });
            bindings.push(Binding {
                addr: transfer.dst + row * transfer.dst_pitch,
                len: transfer.width,
                native: 0,
                access: Access::Write,
            });
        }
        let width = transfer.width as usize;
        let body = KernelBody::run(move |launch| {
            for (i, row) in launch.params_bytes().chunks_exact(width).enumerate() {
                let (to, len) = launch.pointer::<u8>(i);
                debug_assert_eq!(len, width);
                // SAFETY: the machine has checked the binding, which has the length of the row.
                unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), to, width) };
            }
            Ok(())
        });
        let accesses = vec![Access::Write; bindings.len()];
        let spec = KernelSpec::new(&accesses, bytes.len() as u32, body);
        let kernel = Arc::new(Kernel { name: "copy from pageable memory".into(), spec });
        Work::Kernel(KernelCall::new(kernel, bindings, bytes), 0)
    }

    /// Gives calls of a rank to a stream, as a communication library launches its kernel. If the
    /// stream is captured, they become a node. The rank is one of this driver's
    /// [machine](Self::machine).
    ///
    /// # Errors
    /// Those of a launch; `InvalidArgument` for calls that the machine refuses.
    ///
    /// # Safety
    /// - The stream may read and write the calls' memory in its order, at each launch of a graph
    ///   too. The memory stays valid until this work is over.
    pub unsafe fn meet(&self, stream: NativeStream, meet: Meet) -> Result<()> {
        const API: &str = "cuLaunchKernel";
        let scope = self.enter(API)?;
        self.give(API, scope, stream, Work::Meet(meet)).map(drop)
    }

    fn word_address(&self, api: &'static str, addr: u64) -> Result<()> {
        if !self.config.stream_words {
            return Err(refuse(api, code::NOT_SUPPORTED));
        }
        if addr.is_multiple_of(8) && self.is_device_range(addr, 8) {
            Ok(())
        } else {
            Err(refuse(api, code::INVALID_VALUE))
        }
    }
}

impl StreamOps for SimDriver {
    fn stream_create(&self, _priority: i32) -> Result<NativeStream> {
        const API: &str = "cuStreamCreateWithPriority";
        let scope = self.enter(API)?;
        self.new_stream(API, scope, None)
    }

    unsafe fn stream_destroy(&self, stream: NativeStream) -> Result<()> {
        const API: &str = "cuStreamDestroy";
        let (scope, told) = self.enter_teardown(API)?;
        let mut tables = self.lock();
        let (handle, stream) = tables.stream(API, scope, stream)?;
        tables.capture_leave(&self.machine, handle);
        tables.streams.remove(&handle);
        let gone = self.machine.queue_destroy(stream.queue);
        drop(tables);
        told.and(gone.map_err(|e| self.told(API, scope.device, 0, e)))
    }

    unsafe fn stream_query(&self, stream: NativeStream) -> Result<Progress> {
        const API: &str = "cuStreamQuery";
        let scope = self.enter(API)?;
        self.ensure_default(scope, stream)?;
        let stream = {
            let mut tables = self.lock();
            let stream = tables.stream(API, scope, stream)?;
            tables.forbidden_on_captured(API, stream.0)?;
            tables.forbidden_in_capture(API)?;
            stream.1
        };
        match self.machine.queue_query(stream.queue) {
            Ok(true) => Ok(Progress::Complete),
            Ok(false) => Ok(Progress::Pending),
            Err(e) => Err(self.told(API, scope.device, 0, e)),
        }
    }

    unsafe fn stream_synchronize(&self, stream: NativeStream) -> Result<()> {
        const API: &str = "cuStreamSynchronize";
        let scope = self.enter(API)?;
        self.ensure_default(scope, stream)?;
        let stream = {
            let mut tables = self.lock();
            let stream = tables.stream(API, scope, stream)?;
            tables.forbidden_on_captured(API, stream.0)?;
            tables.forbidden_in_capture(API)?;
            stream.1
        };
        self.machine
            .queue_synchronize(stream.queue, None)
            .map_err(|e| self.told(API, scope.device, 0, e))
    }

    fn may_be_stream(&self, stream: NativeStream) -> bool {
        self.lock().streams.contains_key(&stream.0)
    }

    unsafe fn stream_wait_event(&self, stream: NativeStream, event: NativeEvent) -> Result<()> {
        const API: &str = "cuStreamWaitEvent";
        let scope = self.enter(API)?;
        self.ensure_default(scope, stream)?;
        let mut tables = self.lock();
        let (handle, stream) = tables.stream(API, scope, stream)?;
        // The event may be of another context, and of another device.
        let event = tables
            .events
            .get(&event.0)
            .cloned()
            .ok_or_else(|| refuse(API, code::INVALID_HANDLE))?;
        let recorded = self.machine.event_is_recorded(event.id)?;
        if let Some(captured) = tables.capture_wait(API, handle, &event, recorded) {
            return captured;
        }
        let given = self.machine.enqueue(stream.queue, Command::WaitEvent(event.id));
        drop(tables);
        given.map_err(|e| self.told(API, scope.device, 0, e))
    }

    unsafe fn stream_write_word(&self, stream: NativeStream, addr: u64, value: u64) -> Result<()> {
        const API: &str = "cuStreamWriteValue64";
        let scope = self.enter(API)?;
        self.word_address(API, addr)?;
        self.give(API, scope, stream, Work::Write { addr, value }).map(drop)
    }

    unsafe fn stream_wait_word(&self, stream: NativeStream, addr: u64, value: u64) -> Result<()> {
        const API: &str = "cuStreamWaitValue64";
        let scope = self.enter(API)?;
        self.word_address(API, addr)?;
        self.give(API, scope, stream, Work::Wait { addr, value }).map(drop)
    }

    unsafe fn host_function(&self, stream: NativeStream, call: HostFunction) -> Result<()> {
        const API: &str = "cuLaunchHostFunc";
        let scope = self.enter(API)?;
        self.ensure_default(scope, stream)?;
        let mut tables = self.lock();
        let (handle, stream) = tables.stream(API, scope, stream)?;
        // A node could run several times, but this function runs only once.
        tables.forbidden_on_captured(API, handle)?;
        let call = Box::new(move || call_back(call));
        let given = self.machine.enqueue(
            stream.queue,
            Command::Host { name: "host function".into(), call, always: false },
        );
        drop(tables);
        given.map_err(|e| self.told(API, scope.device, 0, e))
    }

    unsafe fn launch(&self, stream: NativeStream, launch: &Launch<'_>) -> Result<()> {
        const API: &str = "cuLaunchKernel";
        let scope = self.enter(API)?;
        let work = self.lock().kernel_call(API, scope, launch)?;
        self.give(API, scope, stream, work).map(drop)
    }

    unsafe fn launch_ex(&self, stream: NativeStream, launch: &Launch<'_>) -> Result<()> {
        const API: &str = "cuLaunchKernelEx";
        let scope = self.enter(API)?;
        self.check_attributes(API, launch)?;
        let work = self.lock().kernel_call(API, scope, launch)?;
        self.give(API, scope, stream, work).map(drop)
    }

    unsafe fn copy(&self, stream: NativeStream, copy: &NativeCopy) -> Result<()> {
        let api = match (copy.rows, copy.kind) {
            (1, CopyKind::HostToDevice) => "cuMemcpyHtoDAsync",
            (1, CopyKind::DeviceToHost) => "cuMemcpyDtoHAsync",
            (1, CopyKind::DeviceToDevice) => "cuMemcpyDtoDAsync",
            _ => "cuMemcpy2DAsync",
        };
        let scope = self.enter(api)?;
        // SAFETY: the caller vouches for both ranges until the copy is over.
        let mut work = unsafe { self.checked_copy(api, copy) }?;
        let mut waits = false;
        let captured = self.lock().capture_of(stream.0).is_some();
        if let Work::Copy(transfer, kind) = &work
            && !captured
            && transfer.bytes() != 0
        {
            let extent = |pitch: u64| (transfer.rows - 1) * pitch + transfer.width;
            match kind {
                CopyKind::HostToDevice
                    if !self.machine.is_pinned(transfer.src, extent(transfer.src_pitch)) =>
                {
                    // SAFETY: the caller of `copy` vouches for the source.
                    work = unsafe { self.upload(transfer) };
                }
                CopyKind::DeviceToHost => {
                    waits = !self.machine.is_pinned(transfer.dst, extent(transfer.dst_pitch))
                }
                _ => {}
            }
        }
        let stream = self.give(api, scope, stream, work)?;
        if waits && !self.stepped_by_hand() {
            self.machine
                .queue_synchronize(stream.queue, None)
                .map_err(|e| self.told(api, scope.device, 0, e))?;
        }
        Ok(())
    }

    /// A source that may be read in any order is read during the call, if the host can.
    unsafe fn copy_batch(&self, stream: NativeStream, batch: &NativeBatch<'_>) -> Result<()> {
        const API: &str = "cuMemcpyBatchAsync";
        let scope = self.enter(API)?;
        if !self.config.copy_batch {
            return Err(refuse(API, code::NOT_SUPPORTED));
        }
        self.lock().forbidden_on_captured(API, stream.0)?;
        let mut works = Vec::with_capacity(batch.bytes.len());
        // All pieces are checked before the first one is given.
        for ((&src, &dst), &bytes) in batch.src.iter().zip(batch.dst).zip(batch.bytes) {
            if bytes == 0 {
                return Err(refuse(API, code::INVALID_VALUE));
            }
            let copy = NativeCopy::linear(CopyKind::DeviceToDevice, dst, src, bytes as u64);
            // SAFETY: the caller vouches for both ranges until the copy is over.
            let mut work = unsafe { self.checked_copy(API, &copy) }?;
            if let Work::Copy(transfer, _) = &work
                && batch.order == SourceOrder::Any
                && self.machine.is_pinned(src, bytes as u64)
            {
                // SAFETY: nobody writes the source between the call and the end of the copies.
                work = unsafe { self.upload(transfer) };
            }
            works.push(work);
        }
        works.into_iter().try_for_each(|work| self.give(API, scope, stream, work).map(drop))
    }

    unsafe fn copy_peer(
        &self,
        stream: NativeStream,
        dst: (u64, NativeContext),
        src: (u64, NativeContext),
        bytes: u64,
    ) -> Result<()> {
        const API: &str = "cuMemcpyPeerAsync";
        let scope = self.enter(API)?;
        {
            let tables = self.lock();
            for (addr, context) in [dst, src] {
                let device = tables.contexts.get(&context.0).map(|c| c.device);
                let device = device.ok_or_else(|| refuse(API, code::INVALID_CONTEXT))?;
                if bytes != 0 && self.machine.owner(addr) != Some(device) {
                    return Err(refuse(API, code::INVALID_VALUE));
                }
            }
        }
        let copy = NativeCopy::linear(CopyKind::DeviceToDevice, dst.0, src.0, bytes);
        // SAFETY: both sides are memory of a device (checked).
        let work = unsafe { self.checked_copy(API, &copy) }?;
        self.give(API, scope, stream, work).map(drop)
    }

    unsafe fn fill(&self, stream: NativeStream, fill: &NativeFill) -> Result<()> {
        let api = match fill.width {
            1 => "cuMemsetD8Async",
            2 => "cuMemsetD16Async",
            _ => "cuMemsetD32Async",
        };
        let scope = self.enter(api)?;
        let work = self.checked_fill(api, fill)?;
        self.give(api, scope, stream, work).map(drop)
    }
}

impl EventOps for SimDriver {
    fn event_create(&self, flags: EventFlags) -> Result<NativeEvent> {
        const API: &str = "cuEventCreate";
        let scope = self.enter(API)?;
        let id = self.machine.event_create(scope.device, flags.timing);
        let id = id.map_err(|e| self.told(API, scope.device, 0, e))?;
        let mut tables = self.lock();
        let handle = tables.handle();
        tables.events.insert(
            handle,
            Event { context: scope.context, id, timing: flags.timing, captured: None },
        );
        Ok(NativeEvent(handle))
    }

    unsafe fn event_destroy(&self, event: NativeEvent) -> Result<()> {
        const API: &str = "cuEventDestroy";
        let (scope, told) = self.enter_teardown(API)?;
        let mut tables = self.lock();
        let found = tables.event(API, scope, event)?;
        tables.events.remove(&event.0);
        let gone = self.machine.event_destroy(found.id);
        drop(tables);
        told.and(gone.map_err(|e| self.told(API, scope.device, 0, e)))
    }

    unsafe fn event_record(&self, event: NativeEvent, stream: NativeStream) -> Result<()> {
        const API: &str = "cuEventRecord";
        let scope = self.enter(API)?;
        self.ensure_default(scope, stream)?;
        let mut tables = self.lock();
        let (handle, stream) = tables.stream(API, scope, stream)?;
        let found = tables
            .events
            .get(&event.0)
            .cloned()
            .ok_or_else(|| refuse(API, code::INVALID_HANDLE))?;
        if found.context != stream.context {
            return Err(refuse(API, code::INVALID_HANDLE));
        }
        let capture = tables.capture_of(handle);
        let captured = match capture.and_then(|id| tables.captures.get(&id).map(|c| (id, c))) {
            Some((_, capture)) if capture.broken => {
                return Err(refuse(API, code::STREAM_CAPTURE_INVALIDATED));
            }
            Some((id, capture)) => {
                Some((id, capture.tips.get(&handle).cloned().unwrap_or_default()))
            }
            None => None,
        };
        let given = match captured {
            Some(_) => Ok(()),
            None => self.machine.enqueue(stream.queue, Command::Record(found.id)),
        };
        if given.is_ok()
            && let Some(found) = tables.events.get_mut(&event.0)
        {
            found.captured = captured;
        }
        drop(tables);
        given.map_err(|e| self.told(API, scope.device, 0, e))
    }

    unsafe fn event_query(&self, event: NativeEvent) -> Result<Progress> {
        const API: &str = "cuEventQuery";
        let scope = self.enter(API)?;
        let found = {
            let mut tables = self.lock();
            let found = tables.event(API, scope, event)?;
            tables.forbidden_on_captured_event(API, &found)?;
            tables.forbidden_in_capture(API)?;
            found
        };
        // The query itself steps. An event is also over if the device was lost meanwhile.
        let over = self.machine.event_query(found.id).and_then(|over| {
            if over { self.machine.device_status(scope.device).map(|()| true) } else { Ok(false) }
        });
        match over {
            Ok(true) => Ok(Progress::Complete),
            Ok(false) => Ok(Progress::Pending),
            Err(e) => Err(self.told(API, scope.device, 0, e)),
        }
    }

    unsafe fn event_synchronize(&self, event: NativeEvent) -> Result<()> {
        const API: &str = "cuEventSynchronize";
        let scope = self.enter(API)?;
        let found = {
            let mut tables = self.lock();
            let found = tables.event(API, scope, event)?;
            tables.forbidden_on_captured_event(API, &found)?;
            tables.forbidden_in_capture(API)?;
            found
        };
        let waited = self.machine.event_synchronize(found.id, None);
        // A wait also ends if the device is lost.
        let waited = waited.and_then(|()| self.machine.device_status(scope.device));
        waited.map_err(|e| self.told(API, scope.device, 0, e))
    }

    unsafe fn event_elapsed(&self, start: NativeEvent, end: NativeEvent) -> Result<i64> {
        const API: &str = "cuEventElapsedTime";
        self.enter(API)?;
        let (start, end) = {
            let tables = self.lock();
            let find = |event: NativeEvent| {
                tables
                    .events
                    .get(&event.0)
                    .cloned()
                    .ok_or_else(|| refuse(API, code::INVALID_HANDLE))
            };
            (find(start)?, find(end)?)
        };
        let mut times = [0_i64; 2];
        for (event, time) in [&start, &end].into_iter().zip(&mut times) {
            if !event.timing
                || event.context != start.context
                || !self.machine.event_is_recorded(event.id)?
            {
                return Err(refuse(API, code::INVALID_HANDLE));
            }
            match self.machine.event_time(event.id)? {
                Some(nanos) => *time = nanos as i64,
                None => {
                    return Err(Error::state(
                        "the time between two events is not known before both are over",
                    ));
                }
            }
        }
        Ok(times[1] - times[0])
    }
}
