//! The decode loop: a thread that owns the model and its batch.
//!
//! Jobs come through a channel. Each has a channel for its events. A job whose receiver is gone
//! leaves the batch before the next step, so a client that goes frees its slot. After an error of a
//! step the jobs of the batch end with that error. Everything is then made anew: runtime, model and
//! batch. Jobs that wait stay.
//!
//! This module must not know HTTP or text.

use crate::api::Failure;
use leasehold::{Error, Result};
use leasehold_llama::{Batch, Mode, Model, Sampling, SequenceId};
use serde::Serialize;
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Instant;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;

/// Makes the model, at the start and after a failure. The former one is gone by then.
pub type Load = Box<dyn FnMut() -> Result<Model> + Send>;

/// The size of the batch.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Sequences that are decoded together.
    pub slots: usize,
    /// Tokens of a sequence at most: prompt and new ones.
    pub positions: usize,
    /// The tokens that end a text.
    pub end_tokens: Vec<u32>,
}

/// A prompt and what becomes of it.
#[derive(Debug)]
pub struct Job {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// The choice of tokens.
    pub sampling: Sampling,
    /// New tokens at most.
    pub tokens: usize,
    /// When the job ends with an error.
    pub deadline: Instant,
    /// Where its tokens go. Without a receiver the job ends.
    pub events: UnboundedSender<Event>,
}

/// An event of a job. After an end no event comes.
#[derive(Debug)]
pub enum Event {
    /// A new token.
    Token(u32),
    /// An end token was drawn.
    Stop,
    /// All tokens were drawn that were asked for, or that fit.
    Length,
    /// The job failed.
    Failed(Failure),
}

/// The engine in numbers.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Status {
    /// The error of the last attempt to make the model, until one succeeds.
    pub down: Option<String>,
    /// Jobs in the batch.
    pub running: usize,
    /// Jobs that wait for a slot.
    pub waiting: usize,
    /// Jobs that ended with all their tokens.
    pub finished: u64,
    /// Jobs whose receiver went: at a stop string, or with the client.
    pub left: u64,
    /// Jobs that failed.
    pub failed: u64,
    /// How often everything was made anew.
    pub restarts: u64,
    /// Bytes of device memory in use.
    pub device_bytes: u64,
}

/// A running engine.
pub struct Engine {
    /// Takes jobs. The engine ends when all clones are dropped and all jobs are done.
    pub jobs: mpsc::Sender<Job>,
    /// The newest status.
    pub status: watch::Receiver<Status>,
    /// The thread.
    pub thread: JoinHandle<()>,
}

impl Engine {
    /// Makes the model and starts the thread.
    ///
    /// # Errors
    /// Those of `load`; `OutOfMemory` for the batch; `Unavailable` without a thread.
    pub fn start(load: Load, settings: Settings) -> Result<Self> {
        let (jobs, receiver) = mpsc::channel();
        let (sender, status) = watch::channel(Status::default());
        let mut decode = Decode {
            load,
            settings,
            jobs: receiver,
            queue: VecDeque::new(),
            running: HashMap::new(),
            batch: None,
            status: Status::default(),
            sender,
        };
        decode.batch()?;
        decode.tell();
        let thread = thread::Builder::new().name("decode".to_owned()).spawn(move || decode.run());
        let thread = thread.map_err(|e| Error::Unavailable(format!("a thread: {e}").into()))?;
        Ok(Self { jobs, status, thread })
    }
}

/// The state of the thread.
struct Decode {
    load: Load,
    settings: Settings,
    jobs: mpsc::Receiver<Job>,
    queue: VecDeque<Job>,
    /// The jobs in the batch, and how many tokens each has.
    running: HashMap<SequenceId, (Job, usize)>,
    /// The model too, which the batch does not show.
    batch: Option<(Model, Batch)>,
    status: Status,
    sender: watch::Sender<Status>,
}

impl Decode {
    fn run(mut self) {
        while self.receive() {
            if let Err(why) = self.turn() {
                self.restart(&why);
            }
            self.tell();
        }
    }

    /// Takes the jobs that came, and waits for one if there is nothing to do. Returns whether there
    /// is.
    fn receive(&mut self) -> bool {
        if self.queue.is_empty() && self.running.is_empty() {
            match self.jobs.recv() {
                Ok(job) => self.queue.push_back(job),
                Err(mpsc::RecvError) => return false,
            }
        }
        self.queue.extend(self.jobs.try_iter());
        true
    }

    /// Frees slots, fills them, and makes a step. An error is one of the whole batch.
    fn turn(&mut self) -> Result<()> {
        self.forget()?;
        self.admit();
        self.step()
    }

    /// Drops the jobs without a receiver, and those whose time is over.
    fn forget(&mut self) -> Result<()> {
        let now = Instant::now();
        let over = |job: &Job| job.events.is_closed() || job.deadline <= now;
        let late = || Event::Failed(Failure::new(504, "the time of the request is over"));
        let (ended, waiting): (VecDeque<Job>, _) =
            std::mem::take(&mut self.queue).into_iter().partition(over);
        self.queue = waiting;
        ended.into_iter().for_each(|job| self.end(&job, late()));
        let ids: Vec<_> =
            self.running.iter().filter(|(_, (job, _))| over(job)).map(|(id, _)| *id).collect();
        for id in ids {
            if let Some((job, _)) = self.running.remove(&id) {
                self.end(&job, late());
            }
            if let Some((_, batch)) = &mut self.batch {
                batch.remove(id)?;
            }
        }
        Ok(())
    }

    /// Puts waiting jobs into free slots. A job that the batch refuses fails alone.
    fn admit(&mut self) {
        while self.running.len() < self.settings.slots {
            let Some(job) = self.queue.pop_front() else { return };
            match self.batch().and_then(|batch| batch.add(&job.prompt, job.sampling)) {
                Ok(id) => drop(self.running.insert(id, (job, 0))),
                Err(why) => {
                    let failure = Failure::of(&why, if self.batch.is_some() { 500 } else { 503 });
                    self.end(&job, Event::Failed(failure));
                }
            }
        }
    }

    /// The batch; made if there is none.
    fn batch(&mut self) -> Result<&mut Batch> {
        if self.batch.is_none() {
            let Settings { slots, positions, .. } = self.settings;
            let made = (self.load)().and_then(|model| {
                let batch = Batch::new(&model, slots, positions, Mode::Graph)?;
                Ok((model, batch))
            });
            self.status.down = made.as_ref().err().map(ToString::to_string);
            self.batch = Some(made?);
        }
        let none = || Error::Unavailable("there is no batch".into());
        self.batch.as_mut().map(|(_, batch)| batch).ok_or_else(none)
    }

    fn step(&mut self) -> Result<()> {
        let Some((_, batch)) = &mut self.batch else { return Ok(()) };
        for (id, drawn) in batch.step()? {
            let Some((job, tokens)) = self.running.get_mut(&id) else { continue };
            *tokens += 1;
            let end = match drawn {
                // The sequence is not in the batch any more.
                Err(why) => Event::Failed(Failure::of(&why, 500)),
                Ok(drawn) => {
                    let stop = self.settings.end_tokens.contains(&drawn.token);
                    if !stop && job.events.send(Event::Token(drawn.token)).is_err() {
                        continue; // It is forgotten before the next step.
                    }
                    if !stop && *tokens < job.tokens && batch.has_room(id)? {
                        continue;
                    }
                    batch.remove(id)?;
                    if stop { Event::Stop } else { Event::Length }
                }
            };
            let Some((job, _)) = self.running.remove(&id) else { continue };
            count(&mut self.status, &job, &end);
            // Without a receiver nobody needs it.
            let _ = job.events.send(end);
        }
        Ok(())
    }

    fn end(&mut self, job: &Job, event: Event) {
        count(&mut self.status, job, &event);
        let _ = job.events.send(event);
    }

    /// Ends all jobs of the batch with an error, and the batch.
    fn restart(&mut self, why: &Error) {
        self.batch = None;
        self.status.restarts += 1;
        for (_, (job, _)) in std::mem::take(&mut self.running) {
            self.end(&job, Event::Failed(Failure::of(why, 500)));
        }
    }

    fn tell(&mut self) {
        (self.status.running, self.status.waiting) = (self.running.len(), self.queue.len());
        let model = self.batch.as_ref().map(|(model, _)| model);
        self.status.device_bytes = model.map_or(0, |m| m.runtime().allocator().stats().live_bytes);
        self.sender.send_replace(self.status.clone());
    }
}

fn count(status: &mut Status, job: &Job, event: &Event) {
    let counter = match event {
        _ if job.events.is_closed() => &mut status.left,
        Event::Failed(_) => &mut status.failed,
        _ => &mut status.finished,
    };
    *counter += 1;
}
