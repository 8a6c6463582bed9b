//! Stand-ins for Apple's classes, on Linux: the real driver sends its messages to objects that
//! record them.
//!
//! * [`runtime`] defines the functions of an Objective-C runtime that `objc2` calls: lookup of
//!   methods, counts of references, autorelease pools, blocks.
//! * [`metal`] has the methods of the classes and protocols of Foundation and Metal that the driver
//!   uses, with Apple's rules of ownership. Each records its selector and its arguments.
//!
//! The selectors and the types of arguments are those of `objc2-metal`. The objects do no work, so
//! a test over them shows which messages the driver sends, and that it gives back each reference
//! once. It shows nothing of Metal.

pub mod metal;
pub mod runtime;
