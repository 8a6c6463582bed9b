//! Indirect command buffers and capture scopes.
//!
//! This module must not know managers.

use super::super::ops::{
    CaptureOps, IndirectCommand, IndirectOps, NativeCaptureScope, NativeDevice, NativeIndirect,
    NativeQueue,
};
use super::encoder::{range, size};
use super::{RealDriver, at, give, give_some};
use leasehold_core::{Error, Result};
use objc2_foundation::NSString;
use objc2_metal::{
    MTLBuffer, MTLCaptureManager, MTLCaptureScope, MTLCommandQueue, MTLComputePipelineState,
    MTLDevice, MTLIndirectCommandBuffer, MTLIndirectCommandBufferDescriptor,
    MTLIndirectCommandType, MTLIndirectComputeCommand, MTLResourceOptions,
};
use std::ops::Range;

/// The most commands of an indirect command buffer.
const COMMANDS_MAX: u32 = 16_384;
/// The most bindings of a command.
const BUFFERS_MAX: u32 = 31;

impl IndirectOps for RealDriver {
    unsafe fn indirect_create(
        &self,
        device: NativeDevice,
        commands: u32,
        buffers: u32,
    ) -> Result<NativeIndirect> {
        if !(1..=COMMANDS_MAX).contains(&commands) || buffers > BUFFERS_MAX {
            return Err(Error::invalid(format!(
                "{commands} indirect commands of {buffers} buffers: want 1 to {COMMANDS_MAX}, and at \
                 most {BUFFERS_MAX}"
            )));
        }
        self.enter(|| {
            let description = MTLIndirectCommandBufferDescriptor::new();
            description.setCommandTypes(MTLIndirectCommandType::ConcurrentDispatch);
            description.setInheritPipelineState(false);
            description.setInheritBuffers(false);
            description.setMaxKernelBufferBindCount(buffers as usize);
            let device = at!(device => MTLDevice);
            let options = MTLResourceOptions::StorageModeShared
                | MTLResourceOptions::HazardTrackingModeUntracked;
            // SAFETY: the number of commands is within Metal's limit, as checked above.
            let made = unsafe {
                device.newIndirectCommandBufferWithDescriptor_maxCommandCount_options(
                    &description,
                    commands as usize,
                    options,
                )
            };
            give_some("newIndirectCommandBufferWithDescriptor", made).map(NativeIndirect)
        })
    }

    unsafe fn indirect_set(
        &self,
        indirect: NativeIndirect,
        index: u32,
        command: &IndirectCommand<'_>,
    ) -> Result<()> {
        self.enter(|| {
            let indirect = at!(indirect => MTLIndirectCommandBuffer);
            // SAFETY: the index lies in the buffer (the caller's promise).
            let slot = unsafe { indirect.indirectComputeCommandAtIndex(index as usize) };
            slot.reset();
            slot.setComputePipelineState(at!(command.pipeline => MTLComputePipelineState));
            for (i, (buffer, offset)) in command.buffers.iter().enumerate() {
                let buffer = at!(buffer => MTLBuffer);
                // SAFETY: the offset lies in the buffer, and the buffer lives until the commands
                // are over (the caller's promise).
                unsafe { slot.setKernelBuffer_offset_atIndex(buffer, *offset as usize, i) };
            }
            if command.barrier {
                slot.setBarrier();
            }
            slot.concurrentDispatchThreadgroups_threadsPerThreadgroup(
                size(command.dispatch.groups),
                size(command.dispatch.threads),
            );
            Ok(())
        })
    }

    unsafe fn indirect_reset(&self, indirect: NativeIndirect, range: Range<u32>) -> Result<()> {
        self.enter(|| {
            let indirect = at!(indirect => MTLIndirectCommandBuffer);
            // SAFETY: the range lies in the buffer, and no work executes it (the caller's promise).
            unsafe { indirect.resetWithRange(self::range(&range)) };
            Ok(())
        })
    }
}

impl CaptureOps for RealDriver {
    unsafe fn scope_create(&self, queue: NativeQueue, label: &str) -> Result<NativeCaptureScope> {
        self.enter(|| {
            // SAFETY: the process's manager exists as long as the process.
            let manager = unsafe { MTLCaptureManager::sharedCaptureManager() };
            let scope = manager.newCaptureScopeWithCommandQueue(at!(queue => MTLCommandQueue));
            scope.setLabel(Some(&NSString::from_str(label)));
            Ok(NativeCaptureScope(give(scope)))
        })
    }

    unsafe fn scope_begin(&self, scope: NativeCaptureScope) -> Result<()> {
        self.enter(|| {
            at!(scope => MTLCaptureScope).beginScope();
            Ok(())
        })
    }

    unsafe fn scope_end(&self, scope: NativeCaptureScope) -> Result<()> {
        self.enter(|| {
            at!(scope => MTLCaptureScope).endScope();
            Ok(())
        })
    }
}
