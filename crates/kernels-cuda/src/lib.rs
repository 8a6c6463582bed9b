#![doc = include_str!("../README.md")]
#![no_std]

include!(concat!(env!("OUT_DIR"), "/images.rs"));
