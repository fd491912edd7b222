//! Header section: block tables and slots.
