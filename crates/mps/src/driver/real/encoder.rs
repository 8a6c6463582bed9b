//! Compute and blit encoders.
//!
//! This module must not know managers.

use super::super::ops::{
    BlitOps, ComputeDesc, ComputeOps, Dispatch, EncoderOps, NativeBlitEncoder, NativeBuffer,
    NativeCommandBuffer, NativeComputeEncoder, NativeEncoder, NativeFence, NativeHeap,
    NativeIndirect, NativePipeline, Usage,
};
use super::{RealDriver, at, give_some};
use leasehold_core::{Error, Result};
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSRange, NSString};
use objc2_metal::{
    MTLBarrierScope, MTLBlitCommandEncoder, MTLBuffer, MTLCommandBuffer, MTLCommandEncoder,
    MTLComputeCommandEncoder, MTLComputePassDescriptor, MTLComputePipelineState,
    MTLCounterSampleBuffer, MTLDispatchType, MTLFence, MTLHeap, MTLIndirectCommandBuffer,
    MTLResourceUsage, MTLSize,
};
use std::ops::Range;
use std::ptr::NonNull;

/// The most bytes of `setBytes:length:atIndex:`.
const BYTES_MAX: usize = 4096;

/// A size in threads or threadgroups.
pub(super) fn size(of: [u32; 3]) -> MTLSize {
    let [width, height, depth] = of.map(|n| n as usize);
    MTLSize { width, height, depth }
}

/// A range of indices.
pub(super) fn range(of: &Range<u32>) -> NSRange {
    NSRange::new(of.start as usize, of.end.saturating_sub(of.start) as usize)
}

/// Calls `call` with the encoder's base protocol.
fn with_encoder(encoder: NativeEncoder, call: impl FnOnce(&ProtocolObject<dyn MTLCommandEncoder>)) {
    match encoder {
        NativeEncoder::Compute(encoder) => {
            let encoder = at!(encoder => MTLComputeCommandEncoder);
            call(ProtocolObject::from_ref(encoder));
        }
        NativeEncoder::Blit(encoder) => {
            let encoder = at!(encoder => MTLBlitCommandEncoder);
            call(ProtocolObject::from_ref(encoder));
        }
    }
}

impl EncoderOps for RealDriver {
    unsafe fn end_encoding(&self, encoder: NativeEncoder) -> Result<()> {
        self.enter(|| {
            with_encoder(encoder, |encoder| encoder.endEncoding());
            Ok(())
        })
    }

    unsafe fn wait_fence(&self, encoder: NativeEncoder, fence: NativeFence) -> Result<()> {
        self.enter(|| {
            let fence = at!(fence => MTLFence);
            match encoder {
                NativeEncoder::Compute(e) => at!(e => MTLComputeCommandEncoder).waitForFence(fence),
                NativeEncoder::Blit(e) => at!(e => MTLBlitCommandEncoder).waitForFence(fence),
            }
            Ok(())
        })
    }

    unsafe fn update_fence(&self, encoder: NativeEncoder, fence: NativeFence) -> Result<()> {
        self.enter(|| {
            let fence = at!(fence => MTLFence);
            match encoder {
                NativeEncoder::Compute(e) => at!(e => MTLComputeCommandEncoder).updateFence(fence),
                NativeEncoder::Blit(e) => at!(e => MTLBlitCommandEncoder).updateFence(fence),
            }
            Ok(())
        })
    }

    unsafe fn push_group(&self, encoder: NativeEncoder, name: &str) -> Result<()> {
        self.enter(|| {
            let name = NSString::from_str(name);
            with_encoder(encoder, |encoder| encoder.pushDebugGroup(&name));
            Ok(())
        })
    }

    unsafe fn pop_group(&self, encoder: NativeEncoder) -> Result<()> {
        self.enter(|| {
            with_encoder(encoder, |encoder| encoder.popDebugGroup());
            Ok(())
        })
    }
}

impl ComputeOps for RealDriver {
    unsafe fn compute_encoder(
        &self,
        buffer: NativeCommandBuffer,
        desc: &ComputeDesc,
    ) -> Result<NativeComputeEncoder> {
        self.enter(|| {
            let pass = MTLComputePassDescriptor::computePassDescriptor();
            pass.setDispatchType(if desc.concurrent {
                MTLDispatchType::Concurrent
            } else {
                MTLDispatchType::Serial
            });
            if let Some((samples, start, end)) = desc.samples {
                // SAFETY: a pass has four attachments, and this is the first one.
                let attachment =
                    unsafe { pass.sampleBufferAttachments().objectAtIndexedSubscript(0) };
                attachment.setSampleBuffer(Some(at!(samples => MTLCounterSampleBuffer)));
                // SAFETY: the samples exist (the caller's promise by `ComputeDesc`'s contract).
                unsafe {
                    attachment.setStartOfEncoderSampleIndex(start as usize);
                    attachment.setEndOfEncoderSampleIndex(end as usize);
                }
            }
            let buffer = at!(buffer => MTLCommandBuffer);
            let encoder = buffer.computeCommandEncoderWithDescriptor(&pass);
            give_some("computeCommandEncoderWithDescriptor", encoder).map(NativeComputeEncoder)
        })
    }

    unsafe fn set_pipeline(
        &self,
        encoder: NativeComputeEncoder,
        pipeline: NativePipeline,
    ) -> Result<()> {
        self.enter(|| {
            let pipeline = at!(pipeline => MTLComputePipelineState);
            at!(encoder => MTLComputeCommandEncoder).setComputePipelineState(pipeline);
            Ok(())
        })
    }

    unsafe fn set_buffer(
        &self,
        encoder: NativeComputeEncoder,
        buffer: NativeBuffer,
        offset: u64,
        index: u32,
    ) -> Result<()> {
        self.enter(|| {
            let buffer = at!(buffer => MTLBuffer);
            let encoder = at!(encoder => MTLComputeCommandEncoder);
            // SAFETY: offset and index are within their limits (the caller's promise).
            unsafe {
                encoder.setBuffer_offset_atIndex(Some(buffer), offset as usize, index as usize);
            }
            Ok(())
        })
    }

    unsafe fn set_bytes(
        &self,
        encoder: NativeComputeEncoder,
        bytes: &[u8],
        index: u32,
    ) -> Result<()> {
        if bytes.is_empty() || bytes.len() > BYTES_MAX {
            return Err(Error::invalid(format!(
                "{} bytes for setBytes: want 1 to {BYTES_MAX}",
                bytes.len()
            )));
        }
        self.enter(|| {
            let encoder = at!(encoder => MTLComputeCommandEncoder);
            let from = NonNull::from(bytes).cast();
            // SAFETY: Metal copies the slice's bytes. The index is within its limit (the caller's
            // promise).
            unsafe { encoder.setBytes_length_atIndex(from, bytes.len(), index as usize) };
            Ok(())
        })
    }

    unsafe fn set_threadgroup_memory(
        &self,
        encoder: NativeComputeEncoder,
        bytes: u32,
        index: u32,
    ) -> Result<()> {
        self.enter(|| {
            let encoder = at!(encoder => MTLComputeCommandEncoder);
            // SAFETY: size and index are within the device's limits (the caller's promise).
            unsafe {
                encoder.setThreadgroupMemoryLength_atIndex(bytes as usize, index as usize);
            }
            Ok(())
        })
    }

    unsafe fn dispatch(
        &self,
        encoder: NativeComputeEncoder,
        dispatch: &Dispatch<'_>,
    ) -> Result<()> {
        self.enter(|| {
            let encoder = at!(encoder => MTLComputeCommandEncoder);
            encoder.dispatchThreadgroups_threadsPerThreadgroup(
                size(dispatch.groups),
                size(dispatch.threads),
            );
            Ok(())
        })
    }

    unsafe fn barrier(&self, encoder: NativeComputeEncoder) -> Result<()> {
        self.enter(|| {
            let encoder = at!(encoder => MTLComputeCommandEncoder);
            encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
            Ok(())
        })
    }

    unsafe fn use_buffer(
        &self,
        encoder: NativeComputeEncoder,
        buffer: NativeBuffer,
        usage: Usage,
    ) -> Result<()> {
        self.enter(|| {
            let usage = match usage {
                Usage::Read => MTLResourceUsage::Read,
                Usage::ReadWrite => MTLResourceUsage::Read | MTLResourceUsage::Write,
            };
            let resource = ProtocolObject::from_ref(at!(buffer => MTLBuffer));
            at!(encoder => MTLComputeCommandEncoder).useResource_usage(resource, usage);
            Ok(())
        })
    }

    unsafe fn use_heap(&self, encoder: NativeComputeEncoder, heap: NativeHeap) -> Result<()> {
        self.enter(|| {
            at!(encoder => MTLComputeCommandEncoder).useHeap(at!(heap => MTLHeap));
            Ok(())
        })
    }

    unsafe fn execute_indirect(
        &self,
        encoder: NativeComputeEncoder,
        indirect: NativeIndirect,
        range: Range<u32>,
    ) -> Result<()> {
        self.enter(|| {
            let indirect = at!(indirect => MTLIndirectCommandBuffer);
            let encoder = at!(encoder => MTLComputeCommandEncoder);
            // SAFETY: the range's commands were set and stay, and their buffers are resident (the
            // caller's promise).
            unsafe { encoder.executeCommandsInBuffer_withRange(indirect, self::range(&range)) };
            Ok(())
        })
    }
}

impl BlitOps for RealDriver {
    unsafe fn blit_encoder(&self, buffer: NativeCommandBuffer) -> Result<NativeBlitEncoder> {
        self.enter(|| {
            let encoder = at!(buffer => MTLCommandBuffer).blitCommandEncoder();
            give_some("blitCommandEncoder", encoder).map(NativeBlitEncoder)
        })
    }

    unsafe fn copy(
        &self,
        encoder: NativeBlitEncoder,
        from: (NativeBuffer, u64),
        to: (NativeBuffer, u64),
        bytes: u64,
    ) -> Result<()> {
        self.enter(|| {
            let (source, target) = (at!(from.0 => MTLBuffer), at!(to.0 => MTLBuffer));
            let encoder = at!(encoder => MTLBlitCommandEncoder);
            // SAFETY: both ranges lie in their buffers and do not overlap (the caller's promise).
            unsafe {
                encoder.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(
                    source,
                    from.1 as usize,
                    target,
                    to.1 as usize,
                    bytes as usize,
                );
            }
            Ok(())
        })
    }

    unsafe fn fill(
        &self,
        encoder: NativeBlitEncoder,
        at: (NativeBuffer, u64),
        bytes: u64,
        value: u8,
    ) -> Result<()> {
        self.enter(|| {
            let range = NSRange::new(at.1 as usize, bytes as usize);
            let target = at!(at.0 => MTLBuffer);
            at!(encoder => MTLBlitCommandEncoder).fillBuffer_range_value(target, range, value);
            Ok(())
        })
    }
}
