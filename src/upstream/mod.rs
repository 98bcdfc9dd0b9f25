//! One list and watch per resource and scope.
