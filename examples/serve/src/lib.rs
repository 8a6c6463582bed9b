//! An HTTP server over [`leasehold_llama::Batch`], with the endpoints of OpenAI's API: an example
//! of failure, cancellation and memory, and no product.
//!
//! [`engine`] is the decode loop in a thread of its own. [`http`] has the connections, [`api`] the
//! shapes of requests and answers, [`template`] the chat template. A request is a
//! [`Job`](engine::Job) with a channel: tokens come through it, and a receiver that is dropped ends
//! the job.
#![forbid(unsafe_code)]

pub mod api;
pub mod engine;
pub mod http;
pub mod template;
