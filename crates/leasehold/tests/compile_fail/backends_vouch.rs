//! Implementers of a backend vouch for all that safe code relies on.
#![forbid(unsafe_code)]

use leasehold::backend::TimelineSource;
use leasehold::backend::Backing;
use leasehold::backend::{Backend, Device, GraphExec, Stream};

struct Liar;

impl TimelineSource for Liar {}
impl Backing for Liar {}
impl Backend for Liar {}
impl Device for Liar {}
impl Stream for Liar {}
impl GraphExec for Liar {}

fn main() {}
