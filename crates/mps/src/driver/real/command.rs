//! Queues and command buffers.
//!
//! This module must not know managers.

use super::super::ops::{
    AnyEvent, CommandBufferDesc, CommandBufferOps, CompletedHandler, Completion,
    NativeCommandBuffer, NativeDevice, NativeQueue, NativeResidencySet, QueueOps, Status,
};
use super::{RealDriver, at, code_of, give_some, nanos};
use block2::RcBlock;
use leasehold_core::panics::quietly;
use leasehold_core::sync::Mutex;
use leasehold_core::{Error, Result};
use objc2::rc::autoreleasepool;
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::{
    MTLCommandBuffer, MTLCommandBufferDescriptor, MTLCommandBufferErrorOption,
    MTLCommandBufferStatus, MTLCommandQueue, MTLDevice, MTLEvent, MTLResidencySet, MTLSharedEvent,
};
use std::ptr::NonNull;

/// Calls a handler of the runtime on a thread of Metal. A panic must not unwind into Metal.
pub(super) fn call_back(call: impl FnOnce()) {
    if quietly(call).is_none() {
        tracing::error!("a handler on a thread of Metal panicked");
    }
}

/// The outcome of a command buffer that is over.
fn outcome(buffer: &ProtocolObject<dyn MTLCommandBuffer>) -> Completion {
    let failed = buffer.status() == MTLCommandBufferStatus::Error;
    let error = buffer.error().filter(|_| failed);
    let told = error.map(|e| (code_of(&e), e.localizedDescription().to_string()));
    Completion {
        error: told.or_else(|| failed.then(|| (0, "no error was given".to_owned()))),
        started: nanos(buffer.GPUStartTime()),
        ended: nanos(buffer.GPUEndTime()),
    }
}

impl QueueOps for RealDriver {
    unsafe fn queue_create(
        &self,
        device: NativeDevice,
        buffers: u32,
        label: &str,
    ) -> Result<NativeQueue> {
        self.enter(|| {
            let device = at!(device => MTLDevice);
            let queue = device.newCommandQueueWithMaxCommandBufferCount(buffers as usize);
            if let Some(queue) = &queue {
                queue.setLabel(Some(&NSString::from_str(label)));
            }
            give_some("newCommandQueueWithMaxCommandBufferCount", queue).map(NativeQueue)
        })
    }

    unsafe fn queue_add_set(&self, queue: NativeQueue, set: NativeResidencySet) -> Result<()> {
        self.enter(|| {
            at!(queue => MTLCommandQueue).addResidencySet(at!(set => MTLResidencySet));
            Ok(())
        })
    }

    unsafe fn queue_remove_set(&self, queue: NativeQueue, set: NativeResidencySet) -> Result<()> {
        self.enter(|| {
            at!(queue => MTLCommandQueue).removeResidencySet(at!(set => MTLResidencySet));
            Ok(())
        })
    }
}

/// Calls `call` with the event's base protocol.
fn with_event(event: AnyEvent, call: impl FnOnce(&ProtocolObject<dyn MTLEvent>)) {
    match event {
        AnyEvent::Event(event) => call(at!(event => MTLEvent)),
        AnyEvent::Shared(event) => {
            let event = at!(event => MTLSharedEvent);
            call(ProtocolObject::from_ref(event));
        }
    }
}

impl CommandBufferOps for RealDriver {
    unsafe fn command_buffer(
        &self,
        queue: NativeQueue,
        desc: CommandBufferDesc,
    ) -> Result<NativeCommandBuffer> {
        self.enter(|| {
            let options = MTLCommandBufferDescriptor::new();
            options.setRetainedReferences(desc.retained);
            if desc.encoder_status {
                options.setErrorOptions(MTLCommandBufferErrorOption::EncoderExecutionStatus);
            }
            let buffer = at!(queue => MTLCommandQueue).commandBufferWithDescriptor(&options);
            give_some("commandBufferWithDescriptor", buffer).map(NativeCommandBuffer)
        })
    }

    unsafe fn buffer_set_label(&self, buffer: NativeCommandBuffer, label: &str) -> Result<()> {
        self.enter(|| {
            at!(buffer => MTLCommandBuffer).setLabel(Some(&NSString::from_str(label)));
            Ok(())
        })
    }

    unsafe fn on_completed(
        &self,
        buffer: NativeCommandBuffer,
        handler: CompletedHandler,
    ) -> Result<()> {
        self.enter(|| {
            // Metal's type lets a block be called many times; Metal calls this one once.
            let handler = Mutex::new(Some(handler));
            let block =
                RcBlock::new(move |buffer: NonNull<ProtocolObject<dyn MTLCommandBuffer>>| {
                    let Some(handler) = handler.lock().take() else { return };
                    autoreleasepool(|_| {
                        // SAFETY: Metal keeps the command buffer alive while it calls the handler.
                        let outcome = outcome(unsafe { buffer.as_ref() });
                        call_back(|| handler(&outcome));
                    });
                });
            let buffer = at!(buffer => MTLCommandBuffer);
            // SAFETY: Metal copies the block. The handler is `Send`, because Metal calls it on
            // another thread.
            unsafe { buffer.addCompletedHandler(RcBlock::as_ptr(&block)) };
            Ok(())
        })
    }

    unsafe fn encode_wait(
        &self,
        buffer: NativeCommandBuffer,
        event: AnyEvent,
        value: u64,
    ) -> Result<()> {
        self.enter(|| {
            let buffer = at!(buffer => MTLCommandBuffer);
            with_event(event, |event| buffer.encodeWaitForEvent_value(event, value));
            Ok(())
        })
    }

    unsafe fn encode_signal(
        &self,
        buffer: NativeCommandBuffer,
        event: AnyEvent,
        value: u64,
    ) -> Result<()> {
        self.enter(|| {
            let buffer = at!(buffer => MTLCommandBuffer);
            with_event(event, |event| buffer.encodeSignalEvent_value(event, value));
            Ok(())
        })
    }

    unsafe fn commit(&self, buffer: NativeCommandBuffer) -> Result<()> {
        self.enter(|| {
            at!(buffer => MTLCommandBuffer).commit();
            Ok(())
        })
    }

    unsafe fn status(&self, buffer: NativeCommandBuffer) -> Result<Status> {
        self.enter(|| {
            Ok(match at!(buffer => MTLCommandBuffer).status() {
                MTLCommandBufferStatus::NotEnqueued => Status::NotEnqueued,
                MTLCommandBufferStatus::Enqueued => Status::Enqueued,
                MTLCommandBufferStatus::Committed => Status::Committed,
                MTLCommandBufferStatus::Scheduled => Status::Scheduled,
                MTLCommandBufferStatus::Completed => Status::Completed,
                _ => Status::Error,
            })
        })
    }

    unsafe fn completion(&self, buffer: NativeCommandBuffer) -> Result<Completion> {
        self.enter(|| {
            let buffer = at!(buffer => MTLCommandBuffer);
            let over = [MTLCommandBufferStatus::Completed, MTLCommandBufferStatus::Error];
            if !over.contains(&buffer.status()) {
                return Err(Error::state("the command buffer is not over"));
            }
            Ok(outcome(buffer))
        })
    }

    unsafe fn wait_completed(&self, buffer: NativeCommandBuffer) -> Result<()> {
        self.enter(|| {
            at!(buffer => MTLCommandBuffer).waitUntilCompleted();
            Ok(())
        })
    }
}
