//! Encoders of the simulated driver.
//!
//! This module must not know how work runs.

use super::tables::{Object, PipelineState, Tables};
use super::work::{EncoderState, Part, Work};
use super::{Effect, SimDriver, broken};
use crate::{FillCall, KernelCall, Transfer};
use leasehold_core::{Error, Result};
use leasehold_hal::Binding;
use leasehold_mps::driver::ops::{
    BlitOps, ComputeDesc, ComputeOps, Dispatch, EncoderOps, NativeBlitEncoder, NativeBuffer,
    NativeCommandBuffer, NativeComputeEncoder, NativeEncoder, NativeFence, NativeHeap,
    NativeIndirect, NativePipeline, Usage,
};
use std::ops::Range;

/// The most bytes of `setBytes:length:atIndex:`.
const BYTES_MAX: usize = 4096;
/// The largest index of a buffer.
const INDEX_MAX: u32 = 30;

fn number(encoder: NativeEncoder) -> u64 {
    match encoder {
        NativeEncoder::Compute(encoder) => encoder.0,
        NativeEncoder::Blit(encoder) => encoder.0,
    }
}

impl Tables {
    /// An open encoder.
    fn open(&mut self, api: &str, encoder: u64) -> Result<&mut EncoderState> {
        let state = self.encoder_mut(encoder)?;
        if state.ended {
            let text = format!("{api} on {} after endEncoding", state.name);
            return Err(broken(self, Effect::Abort, text));
        }
        self.encoder_mut(encoder)
    }

    /// Notes that the encoder's command buffer uses an object.
    fn note_use(&mut self, encoder: u64, object: u64) -> Result<()> {
        let command = self.encoder_mut(encoder)?.command;
        let memory = self.memory_of(object).cloned();
        self.command_mut(command)?.uses(object, memory.as_ref());
        Ok(())
    }

    /// The address of a range of a buffer.
    fn range(&mut self, api: &str, at: (NativeBuffer, u64), bytes: u64) -> Result<u64> {
        let buffer = self.buffer(at.0.0)?;
        let (addr, len) = (buffer.addr, buffer.bytes);
        if at.1.checked_add(bytes).is_none_or(|end| end > len) {
            let text = format!("{api}: {bytes} bytes at {} of a buffer of {len}", at.1);
            return Err(broken(self, Effect::Abort, text));
        }
        Ok(addr + at.1)
    }

    fn open_encoder(
        &mut self,
        api: &str,
        buffer: NativeCommandBuffer,
        mut encoder: EncoderState,
    ) -> Result<u64> {
        let command = self.command_mut(buffer.0)?;
        if command.open.is_some() || command.committed {
            let what = if command.committed { "committed" } else { "with an open encoder" };
            let text = format!("{api} on {}, which is {what}", command.name);
            return Err(broken(self, Effect::Abort, text));
        }
        command.encoders += 1;
        encoder.name = format!("{}, encoder {}", command.name, command.encoders);
        encoder.plan.name.clone_from(&encoder.name);
        (encoder.command, encoder.device) = (buffer.0, command.device);
        let number = self.add(Object::Encoder(Box::new(encoder)));
        self.command_mut(buffer.0)?.open = Some(number);
        Ok(number)
    }
}

impl EncoderState {
    /// Adds work that overlaps with the present group if the encoder allows it.
    fn push(&mut self, work: Work) {
        let overlaps = self.blit || self.concurrent;
        match self.plan.groups.last_mut() {
            Some(group) if overlaps => group.push(work),
            _ => self.plan.groups.push(vec![work]),
        }
    }

    /// The launch of a pipeline with these buffers: number, address and remaining bytes of each.
    pub(super) fn call(
        pipeline: &PipelineState,
        dispatch: &Dispatch<'_>,
        bound: &dyn Fn(u32) -> Option<(u64, u64)>,
        params: Option<&[u8]>,
        shared: u32,
    ) -> Result<KernelCall, String> {
        let spec = &pipeline.kernel.spec;
        let name = &pipeline.kernel.name;
        if dispatch.groups.contains(&0) || dispatch.threads.contains(&0) {
            return Err(format!("dispatch of {name} with a size of zero"));
        }
        let threads = dispatch.threads.iter().map(|&n| u64::from(n)).product::<u64>();
        if threads > u64::from(pipeline.info.max_threads) {
            return Err(format!("dispatch of {name} with {threads} threads of a threadgroup"));
        }
        let named = !dispatch.bindings.is_empty();
        if named && dispatch.bindings.len() != spec.bindings.len() {
            let (has, wants) = (dispatch.bindings.len(), spec.bindings.len());
            return Err(format!("dispatch of {name} with {has} bindings; it declares {wants}"));
        }
        let some = dispatch.bindings.iter().any(|binding| binding.len != 0);
        let mut bindings = Vec::with_capacity(spec.bindings.len());
        for (i, access) in (0..).zip(&spec.bindings) {
            let whole =
                bound(i).map(|(addr, len)| Binding { addr, len, native: 0, access: *access });
            let binding = match dispatch.bindings.get(i as usize).copied().or(whole) {
                // Metal's validation wants a buffer, also for an argument that is not read.
                Some(binding) if binding.len == 0 && (whole.is_some() || !some) => binding,
                Some(binding) if binding.len == 0 => {
                    return Err(format!("dispatch of {name}: nothing is bound at {i}"));
                }
                Some(binding) => {
                    let end = binding.addr.saturating_add(binding.len);
                    let inside = |w: Binding| w.addr == binding.addr && end <= w.addr + w.len;
                    if !whole.is_some_and(inside) {
                        return Err(format!("dispatch of {name}: binding {i} is not bound so"));
                    }
                    binding
                }
                None => return Err(format!("dispatch of {name}: nothing is bound at {i}")),
            };
            bindings.push(binding);
        }
        let params = match params {
            _ if spec.params == 0 => Vec::new(),
            Some(bytes) if bytes.len() == spec.params as usize => bytes.to_vec(),
            other => {
                let (has, wants) = (other.map_or(0, <[u8]>::len), spec.params);
                return Err(format!("dispatch of {name} with {has} bytes; it declares {wants}"));
            }
        };
        Ok(KernelCall {
            kernel: pipeline.kernel.clone(),
            grid: dispatch.groups,
            block: dispatch.threads,
            shared,
            cluster: [1; 3],
            cooperative: false,
            bindings,
            params,
            early: 0,
            dependent: false,
            partition: None,
        })
    }
}

impl EncoderOps for SimDriver {
    unsafe fn end_encoding(&self, encoder: NativeEncoder) -> Result<()> {
        const API: &str = "endEncoding";
        let number = number(encoder);
        self.count(API, self.lock().device_of(number));
        let mut tables = self.lock();
        let state = tables.open(API, number)?;
        state.ended = true;
        let (command, plan) = (state.command, std::mem::take(&mut state.plan));
        let command = tables.command_mut(command)?;
        command.open = None;
        command.parts.push(Part::Encoder(plan));
        Ok(())
    }

    unsafe fn wait_fence(&self, encoder: NativeEncoder, fence: NativeFence) -> Result<()> {
        const API: &str = "waitForFence";
        let number = number(encoder);
        self.count(API, self.device_of(fence));
        let mut tables = self.lock();
        tables.fence(fence.0)?;
        let state = tables.open(API, number)?;
        if state.plan.updates.contains(&fence.0) {
            let text = format!("{API} after updateFence on {}", state.name);
            return Err(broken(&mut tables, Effect::Abort, text));
        }
        state.plan.waits.push(fence.0);
        tables.note_use(number, fence.0)
    }

    unsafe fn update_fence(&self, encoder: NativeEncoder, fence: NativeFence) -> Result<()> {
        const API: &str = "updateFence";
        let number = number(encoder);
        self.count(API, self.device_of(fence));
        let mut tables = self.lock();
        tables.fence(fence.0)?;
        tables.open(API, number)?.plan.updates.push(fence.0);
        tables.note_use(number, fence.0)
    }

    unsafe fn push_group(&self, encoder: NativeEncoder, _: &str) -> Result<()> {
        const API: &str = "pushDebugGroup";
        let number = number(encoder);
        self.count(API, self.lock().device_of(number));
        self.lock().open(API, number)?.depth += 1;
        Ok(())
    }

    unsafe fn pop_group(&self, encoder: NativeEncoder) -> Result<()> {
        const API: &str = "popDebugGroup";
        let number = number(encoder);
        self.count(API, self.lock().device_of(number));
        let mut tables = self.lock();
        let state = tables.open(API, number)?;
        let Some(depth) = state.depth.checked_sub(1) else {
            let text = format!("{API} without a group on {}", state.name);
            return Err(broken(&mut tables, Effect::Abort, text));
        };
        state.depth = depth;
        Ok(())
    }
}

impl ComputeOps for SimDriver {
    unsafe fn compute_encoder(
        &self,
        buffer: NativeCommandBuffer,
        desc: &ComputeDesc,
    ) -> Result<NativeComputeEncoder> {
        const API: &str = "computeCommandEncoderWithDescriptor";
        self.enter(API, self.device_of(buffer))?;
        let mut tables = self.lock();
        let mut encoder = EncoderState { concurrent: desc.concurrent, ..EncoderState::default() };
        if let Some((samples, start, end)) = desc.samples {
            let all = &tables.samples(samples.0)?.samples;
            let Some(pair) = all.get(start as usize).zip(all.get(end as usize)) else {
                let text = format!("{API}: samples {start} and {end} of {}", all.len());
                return Err(broken(&mut tables, Effect::Abort, text));
            };
            encoder.plan.samples = Some((*pair.0, *pair.1));
            tables.command_mut(buffer.0)?.uses(samples.0, None);
        }
        tables.open_encoder(API, buffer, encoder).map(NativeComputeEncoder)
    }

    unsafe fn set_pipeline(
        &self,
        encoder: NativeComputeEncoder,
        pipeline: NativePipeline,
    ) -> Result<()> {
        const API: &str = "setComputePipelineState";
        self.count(API, self.device_of(encoder));
        let mut tables = self.lock();
        let state = tables.pipeline(pipeline.0)?.clone();
        tables.open(API, encoder.0)?.pipeline = Some(state);
        tables.note_use(encoder.0, pipeline.0)
    }

    unsafe fn set_buffer(
        &self,
        encoder: NativeComputeEncoder,
        buffer: NativeBuffer,
        offset: u64,
        index: u32,
    ) -> Result<()> {
        const API: &str = "setBuffer";
        self.count(API, self.device_of(encoder));
        let mut tables = self.lock();
        tables.open(API, encoder.0)?;
        let state = tables.buffer(buffer.0)?;
        let (addr, bytes) = (state.addr, state.bytes);
        if offset >= bytes || index > INDEX_MAX {
            let text = format!("{API}: offset {offset} of {bytes} bytes at index {index}");
            return Err(broken(&mut tables, Effect::Abort, text));
        }
        let bound = (buffer.0, addr + offset, bytes - offset);
        tables.open(API, encoder.0)?.bound.insert(index, bound);
        tables.note_use(encoder.0, buffer.0)
    }

    unsafe fn set_bytes(
        &self,
        encoder: NativeComputeEncoder,
        bytes: &[u8],
        index: u32,
    ) -> Result<()> {
        const API: &str = "setBytes";
        self.count(API, self.device_of(encoder));
        if bytes.is_empty() || bytes.len() > BYTES_MAX || index > INDEX_MAX {
            return Err(Error::invalid(format!(
                "{} bytes for setBytes: want 1 to {BYTES_MAX}",
                bytes.len()
            )));
        }
        self.lock().open(API, encoder.0)?.bytes.insert(index, bytes.to_vec());
        Ok(())
    }

    unsafe fn set_threadgroup_memory(
        &self,
        encoder: NativeComputeEncoder,
        bytes: u32,
        index: u32,
    ) -> Result<()> {
        const API: &str = "setThreadgroupMemoryLength";
        self.count(API, self.device_of(encoder));
        let mut tables = self.lock();
        let shared = &mut tables.open(API, encoder.0)?.shared;
        shared.insert(index, bytes);
        let sum = shared.values().map(|&b| u64::from(b)).sum::<u64>();
        if !bytes.is_multiple_of(16) || sum > u64::from(super::memory::THREADGROUP_MEMORY) {
            let text = format!("{API}: {bytes} bytes, {sum} in all");
            return Err(broken(&mut tables, Effect::Abort, text));
        }
        Ok(())
    }

    unsafe fn dispatch(
        &self,
        encoder: NativeComputeEncoder,
        dispatch: &Dispatch<'_>,
    ) -> Result<()> {
        const API: &str = "dispatchThreadgroups";
        self.count(API, self.device_of(encoder));
        let mut tables = self.lock();
        let state = tables.open(API, encoder.0)?;
        let call = match &state.pipeline {
            None => Err(format!("{API} without a pipeline on {}", state.name)),
            Some(pipeline) => {
                let after = pipeline.kernel.spec.bindings.len() as u32;
                let bound = |i: u32| state.bound.get(&i).map(|b| (b.1, b.2));
                let params = state.bytes.get(&after).map(Vec::as_slice);
                let shared = state.shared.values().sum();
                EncoderState::call(pipeline, dispatch, &bound, params, shared)
            }
        };
        match call {
            Ok(call) => {
                state.push(Work::Kernel(call));
                Ok(())
            }
            Err(text) => Err(broken(&mut tables, Effect::Abort, text)),
        }
    }

    unsafe fn barrier(&self, encoder: NativeComputeEncoder) -> Result<()> {
        const API: &str = "memoryBarrierWithScope";
        self.count(API, self.device_of(encoder));
        self.lock().open(API, encoder.0)?.plan.groups.push(Vec::new());
        Ok(())
    }

    unsafe fn use_buffer(
        &self,
        encoder: NativeComputeEncoder,
        buffer: NativeBuffer,
        _: Usage,
    ) -> Result<()> {
        const API: &str = "useResource";
        self.count(API, self.device_of(encoder));
        let mut tables = self.lock();
        let memory = tables.buffer(buffer.0)?.memory.addr;
        tables.open(API, encoder.0)?.plan.resident.insert(memory);
        tables.note_use(encoder.0, buffer.0)
    }

    unsafe fn use_heap(&self, encoder: NativeComputeEncoder, heap: NativeHeap) -> Result<()> {
        const API: &str = "useHeap";
        self.count(API, self.device_of(encoder));
        let mut tables = self.lock();
        let memory = tables.heap(heap.0)?.memory.addr;
        tables.open(API, encoder.0)?.plan.resident.insert(memory);
        tables.note_use(encoder.0, heap.0)
    }

    unsafe fn execute_indirect(
        &self,
        encoder: NativeComputeEncoder,
        indirect: NativeIndirect,
        range: Range<u32>,
    ) -> Result<()> {
        const API: &str = "executeCommandsInBuffer";
        self.count(API, self.device_of(encoder));
        let mut tables = self.lock();
        let commands = &tables.indirect(indirect.0)?.commands;
        let wanted = commands.get(range.start as usize..range.end as usize);
        let all: Option<Vec<_>> = wanted.and_then(|all| all.iter().cloned().collect());
        let Some(all) = all else {
            let text = format!("{API}: commands {range:?}, of which one was not set");
            return Err(broken(&mut tables, Effect::Undefined, text));
        };
        for object in all.iter().flat_map(|stored| &stored.uses) {
            tables.note_use(encoder.0, *object)?;
        }
        let state = tables.open(API, encoder.0)?;
        // Commands overlap with each other, and with the dispatches of a concurrent encoder.
        if !state.concurrent {
            state.plan.groups.push(Vec::new());
        }
        for stored in all {
            state.plan.needed.extend(stored.needed);
            if stored.barrier || state.plan.groups.is_empty() {
                state.plan.groups.push(Vec::new());
            }
            if let Some(group) = state.plan.groups.last_mut() {
                group.push(Work::Kernel(stored.call));
            }
        }
        tables.note_use(encoder.0, indirect.0)
    }
}

impl BlitOps for SimDriver {
    unsafe fn blit_encoder(&self, buffer: NativeCommandBuffer) -> Result<NativeBlitEncoder> {
        const API: &str = "blitCommandEncoder";
        self.enter(API, self.device_of(buffer))?;
        let encoder = EncoderState { blit: true, ..EncoderState::default() };
        self.lock().open_encoder(API, buffer, encoder).map(NativeBlitEncoder)
    }

    unsafe fn copy(
        &self,
        encoder: NativeBlitEncoder,
        from: (NativeBuffer, u64),
        to: (NativeBuffer, u64),
        bytes: u64,
    ) -> Result<()> {
        const API: &str = "copyFromBuffer";
        self.count(API, self.device_of(encoder));
        let mut tables = self.lock();
        tables.open(API, encoder.0)?;
        let (source, target) = (tables.range(API, from, bytes)?, tables.range(API, to, bytes)?);
        if [from.1, to.1, bytes].iter().any(|n| !n.is_multiple_of(4)) {
            let text = format!("{API}: {bytes} bytes from {} to {}: want 4s", from.1, to.1);
            return Err(broken(&mut tables, Effect::Abort, text));
        }
        let copy = Transfer::linear(source, target, bytes);
        tables.open(API, encoder.0)?.push(Work::Copy(copy));
        tables.note_use(encoder.0, from.0.0)?;
        tables.note_use(encoder.0, to.0.0)
    }

    unsafe fn fill(
        &self,
        encoder: NativeBlitEncoder,
        at: (NativeBuffer, u64),
        bytes: u64,
        value: u8,
    ) -> Result<()> {
        const API: &str = "fillBuffer";
        self.count(API, self.device_of(encoder));
        let mut tables = self.lock();
        tables.open(API, encoder.0)?;
        let target = tables.range(API, at, bytes)?;
        if bytes == 0 || !at.1.is_multiple_of(4) || !bytes.is_multiple_of(4) {
            let text = format!("{API}: {bytes} bytes at {}: want 4s, and some", at.1);
            return Err(broken(&mut tables, Effect::Abort, text));
        }
        let fill = FillCall::linear(target, bytes, u32::from(value), 1);
        tables.open(API, encoder.0)?.push(Work::Fill(fill));
        tables.note_use(encoder.0, at.0.0)
    }
}
