mkdir -p /tmp/m; cp .gpu/m2/w.ab /tmp/m/; ls -la /tmp/m
